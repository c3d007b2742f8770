"""The processes of a run, on Ray: what runs where, from its start to its end."""

from megatron_ibpo.cluster.engines import Engines
from megatron_ibpo.cluster.host import ProcessDiedError
from megatron_ibpo.cluster.placement import Engines as WantedEngines
from megatron_ibpo.cluster.placement import Placement, plan_placement
from megatron_ibpo.cluster.reservation import cluster_nodes, reserved
from megatron_ibpo.cluster.session import ClusterError, open_ray
from megatron_ibpo.cluster.trainers import Trainers

__all__ = [
    "ClusterError",
    "Engines",
    "Placement",
    "ProcessDiedError",
    "Trainers",
    "WantedEngines",
    "cluster_nodes",
    "open_ray",
    "plan_placement",
    "reserved",
]
