"""Models and data sets of the Hugging Face Hub, downloaded into huggingface_hub's own cache, whose rules hold
(HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT); and the upload of the policy that a run exports. The path of
a snapshot has the commit in it."""

import glob
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_ibpo.basics.text import listed
from megatron_ibpo.config import Config
from megatron_ibpo.config.paths import HubId, hub_id, relocated
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.data.files import HELD_OUT, SUFFIXES
from megatron_ibpo.data.tables import first_line

_OF_MODELS = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files of a model's top folder that a run may read besides the weights: configuration, tokenizer."""
_USUAL = ("", "default", "main", "data")
"""Folders to take, in this order, from a repository with several data sets: usual names of the first one."""

Pins = Mapping[str, str]
"""Name of a repository's folder in the cache (models--owner--name) → commit that an earlier start of this run
had."""


class HubError(ValueError):
    """A model or data set that cannot be had; the message says why and what to do."""


def pins_of(runs: Iterable[Path]) -> Pins:
    """Return the commits in the settings (config.yaml) that runs were made with."""
    settings = [text.read_text(errors="replace") for run in runs if (text := run / "config.yaml").is_file()]
    matches = [
        match for text in settings for match in re.findall(r"/([^/\s]+)/snapshots/([0-9a-f]{40})", text)
    ]
    return dict(reversed(matches))  # the first one counts


def local_model(path: Path, pins: Pins = MappingProxyType({}), *, weights: bool = True) -> Path:
    """Return the directory of a model; one of the Hub is downloaded first.

    Args:
        path: a local path, which is returned as it is, or a Hub id.
        weights: False if configuration and tokenizer are enough.

    Raises:
        HubError: the Hub or its cache does not have it; says what to do.
    """
    repo_id = hub_id(path)
    if repo_id is None:
        return path
    if repo_id.path:
        raise HubError(f"--hf-checkpoint {path}: a model is owner/name or owner/name@revision on the Hub")
    repo_id = _pinned(repo_id, "model", pins)
    patterns = [*_OF_MODELS, "*.safetensors"] if weights else [*_OF_MODELS]
    return _snapshot(repo_id, "model", patterns, ["*/*"])


def local_source(spec: str, pins: Pins = MappingProxyType({})) -> str:
    """Return a source of prompts with a path in place of a Hub id; the data set is downloaded first. Its
    task, unless named, is the repository's name. Raises HubError, which says what to do, if the Hub or its
    cache does not have it, or if it has several data sets."""
    location, _, settings = spec.partition("?")
    repo_id = None if "://" in location else hub_id(location)
    if repo_id is None:
        return spec
    repo_id = _pinned(repo_id, "dataset", pins)
    commit, files = _listing(repo_id)
    folder, chosen = _chosen_data(repo_id, files)
    patterns = [glob.escape(file) for file in chosen]
    path = _snapshot(repo_id, "dataset", patterns, revision=commit) / folder
    if not re.search(r"(^|&)task=", settings):
        settings += f"{'&' if settings else ''}task={repo_id.name}"
    return f"{path}?{settings}"


def _pinned(repo_id: HubId, kind: str, pins: Pins) -> HubId:
    from huggingface_hub.file_download import repo_folder_name

    if repo_id.revision is not None:
        return repo_id
    return replace(repo_id, revision=pins.get(repo_folder_name(repo_id=repo_id.repo, repo_type=kind)))


def _snapshot(
    repo_id: HubId,
    kind: str,
    patterns: list[str],
    ignored: list[str] | None = None,
    *,
    revision: str | None = None,
) -> Path:
    """Download the files that match `patterns` and not `ignored`, of this revision or else that of the id;
    return the directory of the snapshot."""
    from huggingface_hub import snapshot_download

    download = partial(
        snapshot_download,
        repo_id.repo,
        repo_type=kind,
        revision=revision or repo_id.revision,
        allow_patterns=patterns,
        ignore_patterns=ignored,
    )
    path = Path(_answer(repo_id, kind, download))
    print(f"{repo_id} of the Hub: commit {path.name}, in {path}", file=sys.stderr, flush=True)
    return path


def _listing(repo_id: HubId) -> tuple[str, list[str]]:
    """Return (commit, names of all files) of a data set; without the Hub, as the cache has them."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    api = HfApi()
    about = partial[dict[str, Any]](dict, repo_id=repo_id.repo, repo_type="dataset")
    revision = _answer(repo_id, "dataset", lambda: api.resolve_revision(**about(revision=repo_id.revision)))
    commit = str(revision.resolved)
    try:
        return commit, [file.path for file in get_cached_repo_tree(**about(revision=commit))]
    except CachedRepoTreeNotFoundError:
        return commit, _answer(repo_id, "dataset", lambda: api.list_repo_files(**about(revision=commit)))


def _chosen_data(repo_id: HubId, files: Iterable[str]) -> tuple[str, list[str]]:
    """Return (the folder or file to read, the files in it); "" is the top folder."""
    data = [file for file in files if file.endswith(SUFFIXES)]
    if repo_id.path in data:
        return repo_id.path, [repo_id.path]
    folders: dict[str, list[str]] = {}
    for file in sorted(data):
        if not repo_id.path or file.startswith(f"{repo_id.path}/"):
            folders.setdefault(_data_set_of(file), []).append(file)
    if not folders:
        raise HubError(
            f"{repo_id}: the data set has no file there that ends in {', '.join(SUFFIXES)}; try "
            f"{repo_id.repo}@refs/convert/parquet, where the Hub keeps others as parquet"
        )
    names = [name or "the top folder" for name in folders]
    usual = list(folders) if len(folders) == 1 else [name for name in _USUAL if name in folders]
    if not usual:
        chosen = replace(repo_id, path=names[0])
        raise HubError(f"{repo_id}: several data sets, {listed(names, most=20)}; name one, such as {chosen}")
    if len(folders) > 1:
        notice = f"{repo_id} has several data sets, {listed(names, most=20)}; taking {usual[0] or names[0]}"
        print(notice, file=sys.stderr, flush=True)
    return usual[0], folders[usual[0]]


def _data_set_of(file: str) -> str:
    """Return the folder of the data set that a file belongs to: its own, or that around train/, test/ …"""
    folder = Path(file).parent
    if folder.name in ("train", *HELD_OUT):
        folder = folder.parent
    return "" if folder == Path() else str(folder)


def _answer(repo_id: HubId, kind: str, ask: Callable[[], Any]) -> Any:
    """Return what the Hub answers."""
    from httpx2 import HTTPError
    from huggingface_hub import constants, errors

    subject = f"{repo_id}: there is no such path, and"
    try:
        return ask()
    except errors.GatedRepoError as error:
        reason = "is gated: accept its terms on its page, then `hf auth login` or set HF_TOKEN"
        raise HubError(f"{subject} on {constants.ENDPOINT} the {kind} {repo_id.repo} {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{subject} the {kind} {repo_id.repo} has no revision {repo_id.revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{subject} no {kind} {repo_id.repo} on {constants.ENDPOINT}; a private one needs "
            "`hf auth login` or HF_TOKEN"
        ) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.RevisionResolutionError,
        errors.OfflineModeIsEnabled,
    ) as error:
        notice = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else f"{constants.ENDPOINT} does not answer ({first_line(error.__cause__ or error)})"
        )
        raise HubError(
            f"{subject} {notice}, and the cache in {constants.HF_HUB_CACHE} lacks the {kind}, or a part of it"
        ) from error
    except (HTTPError, ConnectionError) as error:
        raise HubError(f"{subject} {constants.ENDPOINT} does not give it: {first_line(error)}") from error


def with_local_copies(config: Config) -> Config:
    """Return the configuration with local paths alone; what names the Hub is downloaded first.

    A resumed run gets the commits that it had. The paths have the commits in them, so the run's config.yaml
    records them. The driver downloads; on other nodes the same path must exist (docs/clusters.md).

    Raises:
        HubError: the Hub or its cache does not have it; says what to do.
    """
    load, model = config.run.load, config.model
    pins = pins_of([] if load is None else [load, *load.parents[:2]])
    plans = config.run.dry_run
    model = replace(
        model,
        hf_checkpoint=model.hf_checkpoint and local_model(model.hf_checkpoint, pins, weights=not plans),
        ref_load=model.ref_load and local_model(model.ref_load, pins, weights=not plans),
    )
    config = replace(config, model=model)
    if plans:
        return config
    held_out = config.data.eval_prompt_data
    prompts = tuple(local_source(spec, pins) for spec in config.data.prompt_data)
    if held_out is not None:
        held_out = relocated(held_out, lambda spec: local_source(spec, pins))
    return replace(config, data=replace(config.data, prompt_data=prompts, eval_prompt_data=held_out))


class UploadError(RuntimeError):
    """The Hub did not take a run's export; the message says why and how to upload it later."""


def prepare_upload(run: RunConfig) -> None:
    """Make sure, before a run starts, that the Hub will take its export (--push-to-hub). A repository that
    does not exist is created, and is private. Raises HubError without a token, a right to write there or such
    an owner, or if the Hub cannot be reached."""
    if run.push_to_hub is None or run.dry_run:
        return
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, constants, get_token

    api, flag = HfApi(), f"--push-to-hub {run.push_to_hub}"
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{flag}: HF_HUB_OFFLINE is set, and nothing can be uploaded; unset it")
    if get_token() is None:
        raise HubError(f"{flag}: no token; `hf auth login` stores one, or set HF_TOKEN")
    try:
        api.create_repo(run.push_to_hub, private=True, exist_ok=True)
        api.auth_check(run.push_to_hub, write=True)
    except (HTTPError, OSError) as error:
        raise HubError(f"{flag}: nothing can be uploaded to {api.endpoint}: {_reason(error)}") from error


def upload_export(run: RunConfig, *, stopped: bool) -> None:
    """Upload a run's export (--push-to-hub), unless the run was stopped. The export stays where it is. Raises
    UploadError if the Hub did not take it."""
    if run.push_to_hub is None:
        return
    export, flag = run.run_dir / "hf", f"--push-to-hub {run.push_to_hub}"
    if stopped:
        print(f"{flag}: the run was stopped before its end, so nothing is uploaded", file=sys.stderr)
        return
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=run.push_to_hub, folder_path=export, commit_message="Trained by IBPO")
    except Exception as error:  # the library's errors and those of its transports have no common base
        raise UploadError(
            f"{flag}: not uploaded: {_reason(error)}; the policy is in {export}, and "
            f"`hf upload {run.push_to_hub} {export}` tries again"
        ) from error
    print(f"uploaded {export} to {HfApi().endpoint}/{run.push_to_hub}", file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    """Return what the Hub says, or else the first line of the error."""
    return first_line(getattr(error, "server_message", None) or error)
