"""An SGLang server as plain values: its place in parallelism, the identity of its node, and its user's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbridge.config.loading import read_document
from kvbridge.core.errors import ConfigError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.kit.node import NodePlace, refuse
from kvbridge.engine.sglang import SETTINGS_FILE, SGLANG

FACTS = ("model_path", "revision", "quantization", "dtype", "attention_backend")
"""Arguments that both servers must agree on."""


@dataclass(frozen=True)
class Instance:
    """One data-parallel group of an SGLang server (a replica, or a group of DP attention), as one of its schedulers sees it."""

    role: Role
    rank: Rank
    tp_size: int
    """Attention tensor-parallel ranks."""
    pp_size: int
    dp_rank: int
    dp_size: int
    engine_id: str
    http_port: int
    bootstrap_url: str
    """The directory in the launcher of a prefill server."""
    follows_room: bool
    """Whether a request's room says which data-parallel group computes its prompt."""
    facts: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def runs_node(self) -> bool:
        """Whether the node is a child of this process."""
        return self.rank == Rank(pp=0, tp=0)

    @property
    def led(self) -> tuple[Rank, ...]:
        """The ranks for which this process gives the node its orders: those of its pipeline stage; none behind the first one."""
        return () if self.rank.tp else tuple(Rank(pp=self.rank.pp, tp=tp) for tp in range(self.tp_size))

    @property
    def place(self) -> NodePlace:
        return NodePlace(SGLANG, self.role, self.engine_id, self.settings)


def read_settings(given: str) -> dict[str, Any]:
    """Return the user's settings, which `given` names as a YAML file, or holds in braces. Raises ConfigError."""
    if not given.startswith("{"):
        return read_document(Path(given))[0] if given else {}
    try:
        return dict(yaml.safe_load(given))
    except yaml.YAMLError as error:
        raise ConfigError(f"{SETTINGS_FILE} begins with a brace and is no mapping: {error}") from error


def read_instance(role: Role, arguments: Any, parallel: Any, *, version: str) -> Instance:
    """Read SGLang's ServerArgs and its parallel context.

    Raises UnsupportedError for a split that kvbridge does not serve, ConfigError for the user's settings.
    """
    _require_supported(role, arguments, parallel)
    facts = {name: str(getattr(arguments, name) or "none") for name in FACTS}
    dp_rank = getattr(parallel, "dp_rank", 0) or 0
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(arguments.host, arguments.host)  # noqa: S104 - a wildcard, not a listener
    return Instance(
        role=role,
        rank=Rank(pp=parallel.pp_rank, tp=parallel.attn_tp_rank),
        tp_size=parallel.attn_tp_size,
        pp_size=parallel.pp_size,
        dp_rank=dp_rank,
        dp_size=getattr(parallel, "num_dp_ranks", parallel.dp_size),
        engine_id=f"{host}-{arguments.port}-dp{dp_rank}",
        http_port=arguments.port,
        bootstrap_url=f"http://{f'[{host}]' if ':' in host else host}:{arguments.disaggregation_bootstrap_port}",
        follows_room=arguments.load_balance_method == "follow_bootstrap_room",
        facts={"engine": "sglang", "engine_version": version} | facts,
        settings=read_settings(os.environ.get(SETTINGS_FILE, "")),
    )


def _require_supported(role: Role, arguments: Any, parallel: Any) -> None:
    """Refuse what a transfer cannot serve, with the way out."""
    if role is Role.DECODE and parallel.pp_size > 1:
        refuse("decode has one pipeline stage: leave --pp-size at 1 on decode; prefill may have several")
    if arguments.enable_dp_attention and not hasattr(parallel, "num_dp_ranks"):
        refuse("DP attention is served from SGLang 0.5.23 on: leave --enable-dp-attention out")
    if parallel.attn_cp_size > 1:
        refuse(
            "context parallelism spreads the tokens of a page over ranks: leave --attention-context-parallel-size at 1"
        )
    if getattr(arguments, "enable_pd_role_switch", False):
        refuse("a server keeps its role: leave --enable-pd-role-switch out")
    if getattr(arguments, "disaggregation_enable_kv_checksum", False):
        refuse("kvbridge compares digests itself (integrity.digest): leave --disaggregation-enable-kv-checksum out")
    if getattr(arguments, "disaggregation_decode_allocation_policy", "early") != "early":
        refuse("decode names its pages early: leave --disaggregation-decode-allocation-policy at early")
    if 0 < getattr(arguments, "disaggregation_decode_host_receive_threshold", 1) < 1:
        refuse(
            "decode receives all prompts on the host or none: set --disaggregation-decode-host-receive-threshold to 0 or 1"
        )
    if arguments.nnodes > 1:
        refuse("the ranks of one server are on one host: leave --nnodes at 1")
