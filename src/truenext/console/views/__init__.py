"""Views: ask the broker, and make the data of each page from its answers. Each view takes a visit."""

from truenext.console.views.acting import action as action
from truenext.console.views.acting import begin_work as begin_work
from truenext.console.views.acting import close as close
from truenext.console.views.acting import pause as pause
from truenext.console.views.acting import progress as progress
from truenext.console.views.acting import resume as resume
from truenext.console.views.acting import stop_work as stop_work
from truenext.console.views.dead_letters import dead_letters as dead_letters
from truenext.console.views.messages import body as body
from truenext.console.views.messages import message as message
from truenext.console.views.others import connections as connections
from truenext.console.views.others import durable as durable
from truenext.console.views.others import scheduled as scheduled
from truenext.console.views.others import security as security
from truenext.console.views.others import settings as settings
from truenext.console.views.others import spark as spark
from truenext.console.views.overview import overview as overview
from truenext.console.views.queues import queue as queue
from truenext.console.views.queues import queues as queues
from truenext.console.views.stages import dismiss as dismiss
from truenext.console.views.stages import flow as flow
from truenext.console.views.stages import flows as flows
from truenext.console.views.stages import stages as stages
