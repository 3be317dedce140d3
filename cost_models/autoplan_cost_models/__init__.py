"""Cost models: a region's graph and a hardware profile come in; seconds, bytes and FLOPs go out."""

from autoplan_cost_models.collectives import Links, Span
from autoplan_cost_models.kernels import CollectiveCall, Kernel, Operation
from autoplan_cost_models.memory import NamedBytes
from autoplan_cost_models.operations import operations
from autoplan_cost_models.region_cost import CostModel, RegionCost
from autoplan_cost_models.region_work import ParameterUse, RegionWork, measure_region
from autoplan_cost_models.schedule import Event, Timeline, in_flight, lower_bound_s, simulate
from autoplan_cost_models.step import price_plan
from autoplan_cost_models.training_state import StateBytes, state_bytes

__all__ = [
    "CollectiveCall",
    "CostModel",
    "Event",
    "Kernel",
    "Links",
    "NamedBytes",
    "Operation",
    "ParameterUse",
    "RegionCost",
    "RegionWork",
    "Span",
    "StateBytes",
    "Timeline",
    "in_flight",
    "lower_bound_s",
    "measure_region",
    "operations",
    "price_plan",
    "simulate",
    "state_bytes",
]
