"""DeepSpeed keys that mdsp does not pass on, each with the reason and the way out.

Together with the fields of `RunFile` these are all the keys that DeepSpeed 0.19.8 reads; a test compares them with it.
"""

from __future__ import annotations

_REMOVED = "was removed from DeepSpeed and would be ignored; delete it"
_STAGE_3 = "belongs to ZeRO-3, which does not work in a pipeline; delete it"
_OFFLOAD = "is for offloading, which is broken with bf16 in a pipeline; delete it and use a larger data-parallel degree"
_AVERAGE = "changes how gradients are averaged, and mdsp's loss is already the token mean; delete it"

REFUSED_KEYS: dict[str, str] = {
    "bfloat16": 'is an old name; write "bf16"',
    "tensor_parallel": "is DeepSpeed's AutoTP for other models; use mdsp.parallel.tensor",
    "sequence_parallel_size": "is DeepSpeed's Ulysses for other models; use mdsp.parallel.sequence_parallel",
    "seq_parallel_communication_data_type": "belongs to DeepSpeed's Ulysses, which is not used; delete it",
    "expert_parallel": "needs a mixture-of-experts model, which mdsp does not have; delete it",
    "use_data_before_expert_parallelism": "needs a mixture-of-experts model, which mdsp does not have; delete it",
    "activation_checkpointing": "is not how mdsp recomputes; use mdsp.train.recompute",
    "torch_autocast": "is not proven with tensor parallelism; use bf16 or fp16",
    "compile": "is not proven with the pipeline engine; delete it",
    "autotuning": "does not know tensor and pipeline parallelism; use `mdsp plan`",
    "hybrid_engine": "is for generation during training, which the pipeline engine cannot do; delete it",
    "weight_quantization": "is for inference; delete it",
    "data_efficiency": "would change the data order behind mdsp's back; use mdsp.data",
    "dataloader_drop_last": "belongs to DeepSpeed's data loader, which is not used; use mdsp.data",
    "vocabulary_size": "is not read by the model; use mdsp.model.vocab_size",
    "datastates_ckpt": "would replace mdsp's checkpoint writer; use mdsp.checkpoint",
    "managed_gradient_accumulation": "must stay on: the pipeline engine owns the steps; delete it",
    "gradient_allreduce_op": _AVERAGE,
    "prescale_gradients": _AVERAGE,
    "gradient_predivide_factor": _AVERAGE,
    "checkpoint.load_universal": "is decided by mdsp from the checkpoint itself; use mdsp.checkpoint.resume",
    "checkpoint.use_node_local_storage": "would scatter a checkpoint that all ranks must see; delete it",
    "checkpoint.writer": "would replace mdsp's checkpoint writer; use mdsp.checkpoint",
    "checkpoint.checkpoint_serialization": "would replace mdsp's checkpoint writer; use mdsp.checkpoint",
    "data_types.param_dtype": "would change the weights' format behind mdsp's back; use bf16 or fp16",
    "data_types.buffer_dtype": "would change the rotary tables' format; delete it",
    "data_types.keep_in_fp32_modules": "names modules of transformers; delete it",
    "bf16.bf16_master_weights_and_grads": "gives up fp32 accumulation, which bf16 training needs; delete it",
    "bf16.bf16_optimizer_states": "gives up fp32 optimizer state, which bf16 training needs; delete it",
    "fp16.fp16_master_weights_and_grads": "gives up fp32 master weights, which fp16 training needs; delete it",
    "pipeline.stages": "is not read by the engine; use mdsp.parallel.pipeline",
    "pipeline.partition": "is not read by the engine; use mdsp.parallel.blocks_per_stage",
    "optimizer.legacy_fusion": "belongs to an old fp16 optimizer; delete it",
    "optimizer.params.max_grad_norm": "is not an optimizer argument; use gradient_clipping",
    "zero_optimization.offload_param": "needs ZeRO-3, which does not work in a pipeline; use a larger degree",
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.round_robin_gradients": _OFFLOAD,
    "zero_force_ds_cpu_optimizer": _OFFLOAD,
    "aio": _OFFLOAD,
    "optimizer.params.fp32_optimizer_states": _OFFLOAD,
    "optimizer.params.fused": "is set by mdsp; delete it",
    "optimizer.params.foreach": "is set by mdsp; delete it",
    "zero_optimization.cpu_offload_param": "needs ZeRO-3, which does not work in a pipeline; delete it",
    "zero_optimization.compute_grad_norm": "must stay on: clipping and the log need the norm; delete it",
    "zero_optimization.zenflow": "is not proven with the pipeline engine; delete it",
    **dict.fromkeys(
        (
            "nebula",
            "compression_training",
            "amp",
            "quantize_training",
            "sparse_gradients",
            "eigenvalue",
            "sparse_attention",
            "elasticity",
            "graph_harvesting",
            "curriculum_learning",
            "progressive_layer_drop",
            "zero_optimization.mics_shard_size",
            "zero_optimization.mics_hierarchical_params_gather",
            "zero_optimization.zeropp_loco_param",
        ),
        _REMOVED,
    ),
    **dict.fromkeys(
        (
            "zero_optimization.sub_group_size",
            "zero_optimization.prefetch_bucket_size",
            "zero_optimization.param_persistence_threshold",
            "zero_optimization.model_persistence_threshold",
            "zero_optimization.max_live_parameters",
            "zero_optimization.max_reuse_distance",
            "zero_optimization.gather_16bit_weights_on_model_save",
            "zero_optimization.module_granularity_threshold",
            "zero_optimization.use_all_reduce_for_fetch_params",
            "zero_optimization.allgather_sequential",
            "zero_optimization.memory_efficient_linear",
            "zero_optimization.override_module_apply",
            "zero_optimization.log_trace_cache_warnings",
            "zero_optimization.enable_sanity_checks",
            "zero_optimization.leaf_module",
        ),
        _STAGE_3,
    ),
    **dict.fromkeys(
        (
            "zero_optimization.load_from_fp32_weights",
            "zero_optimization.elastic_checkpoint",
            "zero_optimization.pipeline_loading_checkpoint",
        ),
        "concerns how DeepSpeed reads checkpoints, which mdsp does itself; delete it",
    ),
    "zero_optimization.legacy_stage1": "is an old implementation; delete it",
    "zero_optimization.parameter_alignment": "is not proven with the checkpoint layout; delete it",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "belongs to the Muon optimizer, which is not supported",
}
"""Keys that DeepSpeed documents (or did) and mdsp does not pass on -> why, and what to do instead."""

REFUSED_PREFIXES: dict[str, str] = {
    "zero_optimization.stage3_": _STAGE_3,
    "zero_optimization.zero_": _STAGE_3,
}
"""The same for families of keys."""


def refusal(key: str) -> str | None:
    """Why a documented DeepSpeed key is not passed on, or None."""
    if key in REFUSED_KEYS:
        return REFUSED_KEYS[key]
    return next((reason for prefix, reason in REFUSED_PREFIXES.items() if key.startswith(prefix)), None)
