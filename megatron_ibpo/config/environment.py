"""Settings of environments: episodes of many turns."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from megatron_ibpo.config.ranges import COUNT, SECONDS

if TYPE_CHECKING:
    from megatron_ibpo.config.config import Config


@dataclass
class EnvironmentConfig:
    """Settings of episodes. Without --environment a response is one turn."""

    environment: str | None = None
    """Environment of the prompts: the import path package.module:Class of a class of your own or of another
    framework (docs/environments.md), or openenv://HOST:PORT, a server. A prompt may name its own under
    `environment` in its metadata. It gives the reward, in place of --rm-type. None: responses of one turn."""
    max_turns: Annotated[int, COUNT] = 8
    """Turns of the policy after which an episode is over and scored. 8: enough for the bundled tasks; raise
    it for agents that search or write programs."""
    max_turn_len: Annotated[int | None, COUNT] = None
    """Limit of tokens of one turn of the policy. A turn that reaches it ends the episode. None: what is left
    of --rollout-max-response-len, which limits the whole episode, answers of the environment included."""
    step_timeout: Annotated[float, SECONDS] = 60.0
    """Seconds that one call of an environment may take. 60: a tool that runs a program has a shorter limit of
    its own."""
    episode_timeout: Annotated[float, SECONDS] = 1800.0
    """Seconds that all calls of an environment in one episode may take together. Waiting for the policy does
    not count, so that a busy engine fails no episode."""
    environment_processes: Annotated[int, COUNT] = 256
    """Most environments that run at once on one node; further episodes wait. Each is a process. 256: at 20 MB
    each, 5 GB of main memory."""
    environment_sandbox: bool = False
    """Run environments in bubblewrap: without network, with a read-only file system and a temporary directory
    of their own. Off: most environments need files or a network."""

    def of_samples(self) -> dict[str, Any]:
        """Return the settings that samples depend on, where they are not the defaults: records made before
        there were environments then still have equal settings."""
        without_effect = ("step_timeout", "episode_timeout", "environment_processes")
        own = [one for one in fields(self) if one.name not in without_effect]
        return {one.name: value for one in own if (value := getattr(self, one.name)) != one.default}

    def problems(self, config: "Config") -> list[str]:
        """Return the problems, one line each."""
        found = []
        if self.environment is not None and config.rollout.rollout_prompt_suffixes:
            found.append("--rollout-prompt-suffixes: with --environment the environment writes the prompt")
        return found
