"""Commands of the engine: a method for each command of a client, and the parts that execute commands of clients and of
the broker."""

from __future__ import annotations

from truenext.engine.background.tasks import BackgroundTasks
from truenext.engine.commands.acknowledging import Acknowledging
from truenext.engine.commands.administering import Administering
from truenext.engine.commands.connecting import Connecting
from truenext.engine.commands.pulling import Pulling
from truenext.engine.commands.releasing import Releasing
from truenext.engine.commands.sending import Sending
from truenext.engine.commands.subscribing import Subscribing
from truenext.engine.commands.temporary import TemporaryDestinations
from truenext.engine.commands.transactions import Transactions
from truenext.engine.lifecycle.parts import LifecycleParts
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.queues.queues import Queues
from truenext.engine.state.transaction import TransactionLimits
from truenext.engine.writing.engine_state import EngineState
from truenext.model.policy import WhenFull


class Commands:
    def __init__(
        self,
        state: EngineState,
        resident: ResidentSet,
        queues: Queues,
        life: LifecycleParts,
        tasks: BackgroundTasks,
        when_full: WhenFull,
        limits: TransactionLimits,
    ) -> None:
        commit_state = state.commit_state
        selections, wildcards = queues.selections, queues.wildcards
        arrivals, settlement, pull_requests = life.arrivals, life.settlement, life.pull_requests
        self.sending = sending = Sending(state, queues, arrivals, tasks.scheduler, when_full, limits)
        self.acknowledging = acknowledging = Acknowledging(state, queues, settlement, limits)
        self.transactions = transactions = Transactions(
            state, queues, arrivals, settlement, sending, acknowledging, limits
        )
        self.subscribing = subscribing = Subscribing(
            state, selections, queues, wildcards, settlement, pull_requests, tasks.browsing
        )
        self.releasing = releasing = Releasing(commit_state, selections, settlement, transactions, pull_requests)
        self.pulling = pulling = Pulling(commit_state, pull_requests, releasing)
        self.connecting = connecting = Connecting(state, queues, acknowledging, transactions, subscribing, releasing)
        self._temporary = temporary = TemporaryDestinations(state, queues)
        self.administering = Administering(commit_state, resident, queues, arrivals, settlement)

        # The parts' own methods: a call by the name of the command costs nothing extra.
        self.connect = connecting.connect
        self.log_in = connecting.log_in
        self.disconnect = connecting.disconnect
        self.send = sending.send
        self.send_run = sending.send_run
        self.acknowledge = acknowledging.acknowledge
        self.acknowledge_run = acknowledging.acknowledge_run
        self.nack = acknowledging.nack
        self.mark_started = acknowledging.mark_started
        self.begin = transactions.begin
        self.commit = transactions.commit
        self.abort = transactions.abort
        self.subscribe = subscribing.subscribe
        self.browse = subscribing.browse
        self.unsubscribe = subscribing.unsubscribe
        self.close = subscribing.close
        self.create_temporary = temporary.create
        self.remove_temporary = temporary.remove
        self.release = releasing.release
        self.wake = releasing.wake
        self.pull = pulling.pull
        self.on_all_sent = connecting.on_all_sent
