"""Changes to vLLM's own functions do what they are for, and are made to no other version."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("version", "fits"), [("0.32.0", True), ("0.32.1+cpu", True), ("0.33.0", False)])
def test_a_change_is_made_to_the_version_that_it_was_written_for(monkeypatch, version, fits):
    from megatron_ibpo.engines.vllm import version_guard

    made = []
    monkeypatch.setattr(version_guard, "VERSION", version)

    @version_guard.written_for("0.32")
    def change():
        made.append(version)

    if fits:
        change()
    else:
        with pytest.raises(RuntimeError, match=r"vLLM 0\.33\.0: .*change was written for vLLM 0\.32"):
            change()
    assert made == [version] * fits


def test_every_change_is_guarded():
    from megatron_ibpo.engines.vllm import fixes, gpt_oss_updates

    changes = [fixes._sleep_beside_others, fixes._repack_experts_on_update, fixes._close_up_single_rows]
    changes += [fixes._hold_generators_of_discarded_tokens, fixes._cache_prompts_alone]
    changes += [fixes._read_single_tokens_as_prompts, gpt_oss_updates.take_updates_whole]
    assert all(hasattr(change, "__wrapped__") for change in changes)


@pytest.mark.parametrize("taken", [0, 100])
def test_an_engine_goes_to_sleep_beside_a_process_that_takes_memory(monkeypatch, taken):
    """vLLM's own `sleep` with stand-ins for the device and the allocator. The other process takes more than
    the engine gives back."""
    from vllm.v1.worker.gpu_worker import Worker

    from megatron_ibpo.engines.vllm import fixes

    memory, suspended = SimpleNamespace(free=50), []

    def suspend(level):
        suspended.append(level)
        memory.free += 60 - taken

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (memory.free, 200))
    monkeypatch.setattr(Worker, "sleep", Worker.sleep)  # undone afterwards
    worker = SimpleNamespace(
        sleep_mode_backend=SimpleNamespace(suspend=suspend),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
    )
    if taken:
        with pytest.raises(AssertionError, match="Memory usage increased"):
            Worker.sleep(worker, 1)
        suspended.clear()
    fixes._sleep_beside_others()
    Worker.sleep(worker, 1)
    assert suspended == [1]
