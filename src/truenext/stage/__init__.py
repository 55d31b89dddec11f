"""Stages: services whose work is split into stages; each run of a stage is one transaction. Source: docs/stages.md"""

from truenext.flows.envelope import NotDecoded
from truenext.stage.core.definitions import Endpoint, StageOptions, Topic
from truenext.stage.core.errors import DefinitionError, FlowError, FlowFailed, Reject
from truenext.stage.core.failure import Failure
from truenext.stage.core.flow import Flow
from truenext.stage.core.flow_start import FlowOptions
from truenext.stage.core.initiation import Initiation
from truenext.stage.dependencies.depends import Depends
from truenext.stage.interceptors.interceptor import Interceptor
from truenext.stage.service import Service

__all__ = [
    "DefinitionError",
    "Depends",
    "Endpoint",
    "Failure",
    "Flow",
    "FlowError",
    "FlowFailed",
    "FlowOptions",
    "Initiation",
    "Interceptor",
    "NotDecoded",
    "Reject",
    "Service",
    "StageOptions",
    "Topic",
]
