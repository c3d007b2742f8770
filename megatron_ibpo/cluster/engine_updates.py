"""An update of engines with the trainers' weights, and what it finds out about them."""

import logging
from collections.abc import Mapping, Sequence

from megatron_ibpo.cluster.actor import result
from megatron_ibpo.cluster.deaths import ProcessDiedError
from megatron_ibpo.cluster.engine_handles import SLACK_S, Member, RemoteLink
from megatron_ibpo.cluster.engine_processes import EngineProcesses, Reasons
from megatron_ibpo.engines import EngineError
from megatron_ibpo.weights.transfer.update_order import UpdateOrder

log = logging.getLogger(__name__)


def catch_up(
    processes: EngineProcesses, engines: Sequence[int], order: UpdateOrder
) -> tuple[int, int, Reasons]:
    """Give `engines` the current weights according to `order`, in a second pass to those that fail in the
    first: a living engine can take part again, and a dead one answers so at once. Return (bytes sent, bytes
    of their shards, engines that failed twice)."""
    sent, needed, failed = _pass(processes, engines, order)
    if not failed:
        return sent, needed, {}
    log.warning("\n".join(f"engine {index} has no weights yet: {why}" for index, why in failed.items()))
    sent_again, needed_again, failed = _pass(processes, sorted(failed), order)
    return sent + sent_again, needed + needed_again, failed


def _pass(processes: EngineProcesses, engines: Sequence[int], order: UpdateOrder) -> tuple[int, int, Reasons]:
    """Connect the trainers to those of `engines` that are new to them, and send the weights to all. Return as
    `catch_up`."""
    ranks = range(len(processes.placement.trainers))
    strangers = [index for index in engines if not processes.members[index].connected]
    dead: Reasons = {}
    if strangers:
        asked = [(_links(processes, rank, strangers), strangers) for rank in ranks]
        dead = _reasons(processes, processes.trainers.each("connect", asked))
        for index in strangers:
            processes.members[index].connected = index not in dead
    present = [index for index in engines if index not in dead]
    if not present:
        return 0, 0, dead
    orders = [(_links(processes, rank, present), present, order) for rank in ranks]
    passes = processes.trainers.each("send", orders)
    dead |= _reasons(processes, [done.failures for done in passes])
    for index in dead:
        processes.members[index].connected = False
    return sum(done.num_bytes for done in passes), passes[0].needed_bytes, dead


def draft_acceptance(
    processes: EngineProcesses, members: Sequence[Member], timeout: float
) -> dict[str, float]:
    """Return the share of drafted tokens that engines accepted since the last call; empty if they draft
    none. An engine that dies during the call is noticed when it is next used."""
    if not processes.settings.drafts:
        return {}
    hosts = [member.host for member in members]
    asked = [(host, host.call("call", "drafts", timeout=timeout)) for host in hosts]
    drafted = accepted = 0
    for host, answer in asked:
        try:
            counts = result(answer, host.name, timeout + SLACK_S)
        except (EngineError, ProcessDiedError) as error:
            log.debug("%s: %s", host.name, error)
            continue
        drafted, accepted = drafted + counts[0], accepted + counts[1]
    return {"draft_acceptance": accepted / drafted} if drafted else {}


def _links(processes: EngineProcesses, rank: int, engines: Sequence[int]) -> dict[int, RemoteLink]:
    """Return the engines that this rank is connected to."""
    owners = processes.placement.owners
    return {index: RemoteLink(processes.members[index].host) for index in engines if owners[index] == rank}


def _reasons(processes: EngineProcesses, parts: Sequence[Mapping[int, str]]) -> Reasons:
    """Return every engine that a rank found dead; its owner knows the reason best."""
    owners = processes.placement.owners
    reasons: Reasons = {}
    for rank, part in enumerate(parts):
        for index, reason in part.items():
            if index not in reasons or owners[index] == rank:
                reasons[index] = reason
    return reasons
