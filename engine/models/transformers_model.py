"""Any Hugging Face causal LM over our paged cache: the oracle, and the fallback where no faster
model fits.

Invariant: what is computed for one sequence of a step does not depend on the others in it, but for
the order of additions inside matrix products.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelRefused
from engine.kernels.batch import AttentionBatch
from engine.kernels.ops import select_ops
from engine.models.kv_cache import KVCache
from engine.models.paged_hook import PagedAttentionHook
from engine.models.probe import verify_model
from engine.models.quantisation import plan_quantisation
from engine.models.support import causal_lm_class, load_config
from engine.models.traits import ModelTraits, read_traits, with_kv_dtype


class TransformersModel:
    """A loaded and verified model. It owns its weights; the cache is handed in with each step."""

    def __init__(self, module: Any, traits: ModelTraits, device: torch.device) -> None:
        self.traits = traits
        self.device = device
        self._module = module
        self._ops = select_ops(device)
        self._hook = PagedAttentionHook(traits, self._ops)
        module.set_attn_implementation(self._hook.name)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device,
        dtype: str = "auto",
        progress: Callable[[str], None] = lambda message: None,
        kv_dtype: str = "auto",
    ) -> "TransformersModel":
        """Loads the checkpoint in `folder`. Raises `ModelRefused` for one that cannot be served
        correctly, or is not complete."""
        config = load_config(folder)
        model_class = causal_lm_class(config)
        traits = with_kv_dtype(read_traits(config, folder, dtype), kv_dtype)
        quantised = plan_quantisation(config, device, traits.dtype)
        if quantised is not None:
            traits = replace(traits, dtype=quantised.dtype)
            config = quantised.loading_config(config)
            progress(str(quantised))
        progress(f"loading {traits.num_layers} layers in {traits.dtype} on {device}")
        is_mapped = quantised is not None or device.type != "cpu"
        module = _load_module(model_class, config, folder, traits, device if is_mapped else None)
        if quantised is not None and quantised.reason_unpacked is not None:
            _unify_unpacked(module, getattr(torch, traits.dtype))
        model = cls(module, traits, device)
        progress("comparing packed, paged attention with the model's own")
        try:
            with torch.inference_mode():
                verify_model(model)
        except BaseException as error:
            model.close()
            if quantised is not None and isinstance(error, RuntimeError | ImportError | OSError):
                # Kernels of packed weights show only now whether they are there.
                text = f"it is {quantised}, and does not run on {device}: {error}"
                raise ModelRefused(text) from error
            raise
        return model

    @property
    def weight_bytes(self) -> int:
        """Of parameters and buffers, tied ones once."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        return sum(sizes.values())

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        rows: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """Computes the T packed tokens of `batch` (`token_ids` int64 ``[T]``), writing their KV to
        `cache`. Returns logits ``[len(rows), vocab_size]`` of the packed rows asked for."""
        with self._hook.step(batch, cache):
            logits: torch.Tensor = self._module(
                input_ids=token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=rows,
            ).logits[0]
        if len(logits) != len(rows):
            raise ModelRefused("it does not honour logits_to_keep")
        return logits

    def row_max(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of each row of `forward`'s logits, and its place."""
        return self._ops.row_max(logits)

    def forward_alone(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, vocab_size]`` of one whole sequence by the model's own attention."""
        self._module.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self._module(input_ids=token_ids[None], use_cache=False).logits
        finally:
            self._module.set_attn_implementation(self._hook.name)
        return logits[0]

    def attention_calls(self) -> list[int]:
        """Layers that called attention in the last `forward`, in order."""
        return self._hook.calls

    def close(self) -> None:
        self._hook.close()


def _load_module(
    model_class: Any, config: Any, folder: Path, traits: ModelTraits, device: torch.device | None
) -> Any:
    # Straight to an accelerator, so that the weights are never whole in host memory.
    placement = {} if device is None else {"device_map": {"": str(device)}}
    try:
        module, report = model_class.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, traits.dtype),
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **placement,
        )
    except Exception as error:
        raise ModelRefused(f"transformers cannot load the checkpoint: {error}") from error
    if missing := sorted(report["missing_keys"]):
        # transformers would fill them with random numbers and go on.
        raise ModelRefused(
            f"the checkpoint lacks {len(missing)} tensors, among them {', '.join(missing[:3])}"
        )
    return module.eval().requires_grad_(False)


def _unify_unpacked(module: Any, dtype: torch.dtype) -> None:
    """Older versions of `transformers` unpack to bfloat16 whatever dtype they are asked for."""
    for parameter in module.parameters():
        if parameter.dtype == torch.bfloat16 != dtype:
            parameter.data = parameter.data.to(dtype)
