"""The contestants: one small adapter each, saying whether it is here and what it can serve."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import regard
from benchmarks.calls import Attend, Call, Data
from benchmarks.suites import Case
from regard.reference import visible


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    def missing(self) -> str | None:
        """Why it cannot run on this machine, or None."""

    def refuses(self, case: Case) -> str | None:
        """Why it does not enter a case, or None."""

    def prepare(self, case: Case, data: Data) -> Call:
        """Its call on the case's data, laid out as it likes best. May raise; so may the call."""


@dataclass(frozen=True, slots=True)
class Regard:
    """regard itself, on (b, s, h, d) or packed rows."""

    backend: str | None
    name: str = "regard"

    def missing(self) -> str | None:
        return None

    def refuses(self, case: Case) -> str | None:
        return None

    def prepare(self, case: Case, data: Data) -> Call:
        options: dict[str, Any] = {
            "causal": case.causal,
            "window_size": (case.window, None),
            "backend": self.backend,
        }
        if data.cu_seqlens_q is not None and data.cu_seqlens_k is not None:
            cu_seqlens = (data.cu_seqlens_q, data.cu_seqlens_k)
            return Call.on(
                data, lambda q, k, v: _first(regard.attention_varlen(q, k, v, *cu_seqlens, **options))
            )
        return Call.on(data, lambda q, k, v: _first(regard.attention(q, k, v, **options)))


@dataclass(frozen=True, slots=True)
class Sdpa:
    """One backend of PyTorch's scaled_dot_product_attention, on (b, h, s, d)."""

    name: str
    backend: SDPBackend

    def missing(self) -> str | None:
        return None

    def refuses(self, case: Case) -> str | None:
        if case.packed:
            return "no packed rows"
        if case.window is not None:
            return "no window"
        if case.causal and case.seqlen_q != case.seqlen_k and self.backend is not SDPBackend.FLASH_ATTENTION:
            return "its causal mask is aligned top left"
        return None

    def prepare(self, case: Case, data: Data) -> Call:
        options: dict[str, Any] = {"enable_gqa": case.heads_q != case.heads_k}
        if case.causal and case.seqlen_q != case.seqlen_k:
            options["attn_mask"] = causal_lower_right(case.seqlen_q, case.seqlen_k)
        else:
            options["is_causal"] = case.causal

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(q, k, v, **options)

        return Call.on(data, attend, heads_first=True)


@dataclass(frozen=True, slots=True)
class CpuSdpa:
    """PyTorch's scaled_dot_product_attention as it chooses on a CPU, on (b, h, s, d). A window, or causal
    rows on more keys, needs a boolean mask, which is built before anything is timed."""

    name: str = "SDPA"

    def missing(self) -> str | None:
        return None

    def refuses(self, case: Case) -> str | None:
        return "no packed rows" if case.packed else None

    def prepare(self, case: Case, data: Data) -> Call:
        options: dict[str, Any] = {"enable_gqa": case.heads_q != case.heads_k, "is_causal": case.causal}
        if case.window is not None or (case.causal and case.seqlen_q != case.seqlen_k):
            rows, keys = torch.arange(case.seqlen_q), torch.arange(case.seqlen_k)
            mask = visible(rows, keys, case.seqlen_k - case.seqlen_q, case.window, 0)
            options |= {"is_causal": False, "attn_mask": mask}
        return Call.on(
            data,
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options),
            heads_first=True,
        )


@dataclass(frozen=True, slots=True)
class Flex:
    """FlexAttention compiled for the case's shape, on (b, h, s, d); packed rows as a mask of documents."""

    name: str
    backend: str  # of its kernel_options: "TRITON", or "FLASH" for FlashAttention-4's kernels

    def missing(self) -> str | None:
        return _import_error("flash_attn.cute") if self.backend == "FLASH" else None

    def refuses(self, case: Case) -> str | None:
        if not case.flex:
            return "not entered: it compiles anew for each shape"
        return "packed rows and keys differ in length" if case.lengths_q != case.lengths_k else None

    def prepare(self, case: Case, data: Data) -> Call:
        # The backward is timed on a kept graph, which buffers given away by the first run would forbid.
        torch._functorch.config.donated_buffer = False
        # Past the default of 8 shapes it would silently run uncompiled.
        torch._dynamo.config.recompile_limit = 64
        compiled = torch.compile(flex_attention, dynamic=False)
        return Call.on(data, self.attend(compiled, case, data), heads_first=True)

    def attend(self, function: Any, case: Case, data: Data) -> Attend:
        mask = flex_block_mask(case, data)
        gqa = case.heads_q != case.heads_k
        options = {"BACKEND": self.backend}
        return lambda q, k, v: function(q, k, v, block_mask=mask, enable_gqa=gqa, kernel_options=options)


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """FlashAttention-3 or -4 as installed, on (b, s, h, d) or packed rows."""

    name: str
    module: str
    unlimited: int | None  # how its window_size says "no limit"

    def missing(self) -> str | None:
        return _import_error(self.module)

    def refuses(self, case: Case) -> str | None:
        return None

    def prepare(self, case: Case, data: Data) -> Call:
        module = importlib.import_module(self.module)
        left = self.unlimited if case.window is None else case.window
        right = self.unlimited if case.window is None else 0
        options: dict[str, Any] = {"causal": case.causal, "window_size": (left, right)}
        function = module.flash_attn_func
        if case.lengths_q is not None and case.lengths_k is not None:
            function = module.flash_attn_varlen_func
            options |= {"cu_seqlens_q": data.cu_seqlens_q, "cu_seqlens_k": data.cu_seqlens_k}
            options |= {"max_seqlen_q": max(case.lengths_q), "max_seqlen_k": max(case.lengths_k)}
        return Call.on(data, lambda q, k, v: _first(function(q, k, v, **options)))


def flex_block_mask(case: Case, data: Data) -> BlockMask | None:
    """The case's mask as FlexAttention takes it; None when every row sees every key."""
    if not case.causal and not case.packed:
        return None
    device = data.q.device
    offset = case.seqlen_k - case.seqlen_q
    document: Tensor | None = None
    if case.lengths_q is not None:
        lengths = torch.tensor(case.lengths_q, device=device)
        document = torch.repeat_interleave(torch.arange(len(case.lengths_q), device=device), lengths)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx + offset - kv_idx
        seen = distance >= 0 if case.causal else distance == distance
        if case.window is not None:
            seen = seen & (distance <= case.window)
        if document is not None:
            seen = seen & (document[q_idx] == document[kv_idx])
        return seen

    return create_block_mask(mask_mod, None, None, case.seqlen_q, case.seqlen_k, device=str(device))


PEERS: dict[str, tuple[Contestant, ...]] = {
    "cuda": (
        Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION),
        Sdpa("FA2", SDPBackend.FLASH_ATTENTION),
        Flex("Flex", "TRITON"),
        Flex("Flex FLASH", "FLASH"),
        FlashAttention("FA3", "flash_attn_interface", unlimited=-1),
        FlashAttention("FA4", "flash_attn.cute", unlimited=None),
    ),
    "cpu": (CpuSdpa(),),
}


def distribution_versions(contestants: list[Contestant]) -> dict[str, str]:
    """The installed distribution behind each contestant that is a package of its own."""
    found = {}
    for contestant in contestants:
        if isinstance(contestant, FlashAttention):
            names = packages_distributions().get(contestant.module.split(".")[0], [])
            found[contestant.name] = ", ".join(f"{name} {version(name)}" for name in names) or "unknown"
    return found


def _first(result: Any) -> Tensor:
    """out, where a call may return more with it."""
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
