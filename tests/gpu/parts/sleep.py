import time

import torch
from job import beside, check
from training import set_up, start_policy

from megatron_ibpo.policy.residence import OnDevice
from megatron_ibpo.weights.transfer.wire import checksum

MARGIN = 2**30  # bytes that the other process leaves free
LEAK = 256 * 2**20  # bytes that a second round may leave less free than the first
LEFT = 4 * 2**30  # bytes that a trainer that has left may hold: contexts, workspaces, communicators


def run(job):
    _, config, sequences = set_up(job, "qwen3")
    policy, rank = start_policy(config)
    with beside(Tenant) as tenant:
        tenant.ask("start", job.device)  # its context counts in what is not free
        rounds = []
        for _ in range(2):
            policy.update(sequences)
            rounds.append(one_round(job, rank, tenant))
            job.note(rounds=rounds)
        policy.update(sequences)
    first, second = rounds
    check(first["weights_kept"] and second["weights_kept"], "the weights are not what they were before")
    if job.on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        check(total - first["free_left"] <= LEFT, f"the trainer holds {total - first['free_left']} bytes")
        grown = first["free_left"] - second["free_left"]
        check(grown <= LEAK, f"the second round leaves less free: {rounds}")
        free_gib = f"{first['free_left'] / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        moves = f"leaves in {second['leave_seconds']:.2f} s, is back in {second['return_seconds']:.2f} s"
        job.note(summary=f"{free_gib}, {moves}")


def one_round(job, rank, tenant):
    def sums():
        return {name: checksum(tensor) for name, tensor in rank.export}

    before, found = sums(), {"free_training": free(job)}
    started = time.perf_counter()
    rank.make_room()
    found |= {"leave_seconds": time.perf_counter() - started, "free_left": free(job)}
    taken = max(0, found["free_left"] - MARGIN) if job.on_gpu else 2**20
    tenant.ask("wake", taken)
    found |= {"tenant_bytes": taken, "free_tenant": free(job)}
    tenant.ask("sleep")
    found["free_again"] = free(job)
    started = time.perf_counter()
    rank.residence.bring(OnDevice.EVERYTHING)
    free(job)  # waits for the GPU
    return found | {"return_seconds": time.perf_counter() - started, "weights_kept": sums() == before}


def free(job):
    if not job.on_gpu:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


class Tenant:
    """The other process. What it holds has a pattern that it looks at again before it lets go."""

    def start(self, device):
        self._device = device
        torch.zeros(1, device=device)

    def wake(self, size):
        self._held = torch.full((size,), 7, dtype=torch.uint8, device=self._device)

    def sleep(self):
        if int(self._held.min()) != 7 or int(self._held.max()) != 7:
            raise AssertionError("another process wrote into its memory")
        del self._held
        torch.cuda.empty_cache()
