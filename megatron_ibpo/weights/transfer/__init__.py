"""Weight updates from the trainers to running engines: gloo on CPUs, nccl or ipc on GPUs."""
