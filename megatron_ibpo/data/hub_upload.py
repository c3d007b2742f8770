"""Uploading the policy that a run exports to the Hugging Face Hub."""

import sys

from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.data.hub import HubError


class UploadError(RuntimeError):
    """The Hub did not take a run's export; the message says why and how to upload it later."""


def prepare_upload(run: RunConfig) -> None:
    """Make sure, before a run starts, that the Hub will take its export (--push-to-hub). A repository that
    does not exist is created, and is private.

    Raises:
        HubError: no token, no right to write there, no such owner, or the Hub cannot be reached.
    """
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
    """Upload a run's export (--push-to-hub), unless the run was stopped. The export stays where it is.

    Raises:
        UploadError: the Hub did not take it.
    """
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
    message = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return str(message).partition("\n")[0][:200]
