# syntax=docker/dockerfile:1
# Images with all that `ibpo` needs: tools/bootstrap.sh sets up the pinned packages of requirements/.
#
#   docker build --target cpu -t megatron-ibpo:cpu .
#   docker build --target cuda -t megatron-ibpo:cuda .     needs no GPU; compiles where Transformer Engine has no wheel
#
# docs/containers.md says how they are run.

FROM python:3.11-slim-bookworm AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# bubblewrap holds the programs of code rewards; Triton compiles with g++ while a run goes on; vLLM's CPU kernels need
# libnuma1, NCCL over InfiniBand the verbs, and KubeRay's health checks wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap g++ ibverbs-providers libibverbs1 libnuma1 wget \
    && rm -rf /var/lib/apt/lists/*
ARG USER_ID=1000
RUN useradd --create-home --uid "$USER_ID" ibpo \
    && install --directory --owner ibpo --group ibpo /opt/megatron_ibpo /runs \
    && ln -s /opt/megatron_ibpo/.venv/bin/ibpo /opt/megatron_ibpo/.venv/bin/ray /usr/local/bin/
USER $USER_ID
WORKDIR /opt/megatron_ibpo
# What the packages are made from, before the rest: a change of the rest reuses the layer with the packages.
COPY --chown=ibpo:ibpo LICENSE README.md pyproject.toml setup.py ./
COPY --chown=ibpo:ibpo requirements/ requirements/
COPY --chown=ibpo:ibpo csrc/ csrc/
COPY --chown=ibpo:ibpo tools/bootstrap.sh tools/bootstrap.sh
COPY --chown=ibpo:ibpo megatron_ibpo/__init__.py megatron_ibpo/__init__.py
# PYTHONDONTWRITEBYTECODE has pip compile the packages: what a container compiles by itself is lost with it.
ENV PIP_NO_CACHE_DIR=1
ENTRYPOINT ["ibpo"]

FROM base AS cpu
ARG IBPO_TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN IBPO_DEVICE=cpu PYTHONDONTWRITEBYTECODE=1 bash tools/bootstrap.sh
COPY --chown=ibpo:ibpo . .

# The CUDA of the pinned packages is the only one: the container gets the driver from the NVIDIA container toolkit.
FROM base AS cuda
ARG IBPO_TORCH_INDEX=
ARG MAX_JOBS=4
RUN IBPO_DEVICE=cuda PYTHONDONTWRITEBYTECODE=1 bash tools/bootstrap.sh
COPY --chown=ibpo:ibpo . .
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
