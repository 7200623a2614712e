"""Upstream's unit tests that run on CPU ranks, with the number of ranks and expected outcomes.

The counts were measured with the pinned tag. If one changes, find out why before changing it here.
"""

from __future__ import annotations

from dataclasses import replace

from tests.upstream.table import LeftOut, Suite

SUITES = (
    Suite(
        "pipeline_parallel/test_bridge_communicator.py",
        ranks=8,
        passed=12,
        left_out=(
            LeftOut(
                "te",
                4,
                (
                    "TestBridgeCommunicator::test_bridge_communicator_with_transformer_blocks.*",
                ),
            ),
        ),
    ),
    Suite("pipeline_parallel/test_helpers.py", ranks=1, passed=1, quick=True),
    Suite(
        "pipeline_parallel/test_schedules.py",
        ranks=8,
        passed=63,
        left_out=(
            LeftOut(
                "gloo_race",
                2,
                (
                    "test_forward_backward_pipelining_(without|with)_interleaving_with_custom_pgs",
                ),
            ),
        ),
    ),
    Suite("tensor_parallel/test_cross_entropy.py", ranks=8, passed=1),
    Suite("tensor_parallel/test_data.py", ranks=8, passed=1),
    Suite("tensor_parallel/test_layers.py", ranks=8, passed=2),
    Suite("tensor_parallel/test_mappings.py", ranks=8, passed=7, quick=True),
    Suite(
        "tensor_parallel/test_random.py",
        ranks=8,
        passed=4,
        left_out=(
            LeftOut(
                "cuda_graphs",
                2,
                (
                    r"test_double_fork_cuda_rng_states_tracker\[True\]",
                    "test_convert_cuda_rng_state",
                ),
            ),
            LeftOut("te", 1, ("test_checkpoint_without_output",)),
        ),
    ),
    Suite("tensor_parallel/test_tensor_parallel_utils.py", ranks=8, passed=4),
    Suite(
        "distributed/test_distributed_data_parallel.py",
        ranks=2,
        passed=1,
        skipped=1,
        quick=True,
    ),
    Suite(
        "distributed/test_distributed_data_parallel.py", ranks=8, passed=1, skipped=1
    ),
    Suite("distributed/test_grad_reduce_for_replicated_embedder.py", ranks=8, passed=1),
    Suite("distributed/test_param_and_grad_buffer.py", ranks=8, passed=70, skipped=4),
    Suite(
        "distributed/test_reduce_scatter_with_fp32_accumulation.py", ranks=8, passed=4
    ),
    Suite("dist_checkpointing/test_async_save.py", ranks=8, passed=6),
    Suite("dist_checkpointing/test_checkpointable.py", ranks=8, passed=2),
    Suite(
        "dist_checkpointing/test_fully_parallel.py",
        ranks=8,
        passed=10,
        left_out=(
            LeftOut(
                "cuda_memory", 2, ("TestFullyParallelSaveAndLoad::test_memory_usage.*",)
            ),
        ),
    ),
    Suite("dist_checkpointing/test_global_metadata_reuse.py", ranks=8, passed=2),
    Suite("dist_checkpointing/test_mapping.py", ranks=1, passed=5, quick=True),
    Suite("dist_checkpointing/test_msc.py", ranks=8, passed=1),
    Suite("dist_checkpointing/test_nonpersistent.py", ranks=8, passed=1, skipped=1),
    Suite(
        "dist_checkpointing/test_optimizer.py",
        ranks=8,
        passed=33,
        timeout_s=480,
        left_out=(
            LeftOut(
                "te",
                12,
                ("TestDistributedOptimizer::test_optimizer_common_state_dict.*",),
            ),
            LeftOut(
                "adam",
                16,
                (
                    r"TestOptimizerResharding::test_optimizer_resharding\[.*-False-\w+-False\]",
                ),
            ),
            LeftOut(
                "cost",
                80,
                (
                    "TestDistributedOptimizer::test_model_parallel_dp_group_idx_preservation.*",
                    r"TestOptimizerResharding::test_optimizer_resharding\[initialize_1d.*-True-True-\w+\]",
                    "TestOptimizerResharding::test_chained_optimizer_resharding.*",
                ),
            ),
        ),
    ),
    Suite("dist_checkpointing/test_safe_globals.py", ranks=1, passed=2),
    Suite(
        "dist_checkpointing/test_serialization.py",
        ranks=8,
        passed=36,
        left_out=(
            LeftOut(
                "torch",
                3,
                (
                    "TestSerialization::test_remove_sharded_tensors",
                    "TestNonStrictLoad::test_missing_keys_raises_error_during_validation.*",
                ),
            ),
        ),
    ),
    Suite("dist_checkpointing/test_torch_dist.py", ranks=8, passed=2),
    Suite("dist_checkpointing/models/test_bert_model.py", ranks=8, passed=17),
    Suite(
        "dist_checkpointing/models/test_gpt_model.py",
        ranks=8,
        passed=3,
        left_out=(
            LeftOut(
                "te",
                23,
                (
                    r".*\[.*transformer_engine_spec.*\]",
                    "TestGPTModelReconfiguration::test_state_dict_comparison",
                    "TestGPTModelReconfiguration::test_vocab_size_padding_change.*",
                ),
            ),
        ),
    ),
    Suite(
        "dist_checkpointing/models/test_t5_model.py",
        ranks=8,
        passed=2,
        left_out=(LeftOut("te", 3, (r"TestT5Model::.*\[t5-(te-.*|.*-te)\]",)),),
    ),
    Suite(
        "transformer/moe/test_a2a_token_dispatcher.py", ranks=8, passed=17, skipped=6
    ),
    Suite(
        "transformer/moe/test_aux_loss.py",
        ranks=8,
        passed=50,
        skipped=3,
        left_out=(
            LeftOut(
                "bitwise",
                5,
                ("TestPaddingMaskAuxLoss::test_padding_mask_with_z_loss.*",),
            ),
        ),
    ),
    Suite(
        "transformer/moe/test_moe_layer.py",
        ranks=8,
        passed=35,
        skipped=32,
        left_out=(
            LeftOut(
                "grouped_gemm",
                4,
                (r"TestMoELayerInit::test_legacy_moe_layer\[True-.*",),
            ),
        ),
    ),
    Suite("transformer/moe/test_router_replay.py", ranks=1, passed=6, quick=True),
    Suite(
        "transformer/moe/test_routers.py",
        ranks=1,
        passed=25,
        timeout_s=600,  # products in bfloat16, which torch 2.14 computes slowly on a CPU
        skipped=4,
        left_out=(
            LeftOut("ranks", 14, ("Test(GroupLimited|AuxLossFreeTop2)Router::.*",)),
        ),
    ),
    Suite(
        "transformer/moe/test_sequential_mlp.py",
        ranks=1,
        passed=1,
        skipped=4,
        left_out=(
            LeftOut("cuda_device", 1, ("TestParallelSequentialMLP::test_gpu_forward",)),
        ),
    ),
    Suite("transformer/moe/test_token_dispatcher.py", ranks=8, passed=8, skipped=18),
    Suite("transformer/moe/test_upcycling.py", ranks=1, passed=1, skipped=7),
    Suite(
        "transformer/test_attention_variant_dsa.py",
        ranks=1,
        passed=8,
        left_out=(
            LeftOut(
                "te",
                54,
                (
                    "TestDSAIndexer::.*",
                    "TestDSAttention::.*",
                    "Test(Indexer|DSAttention)TensorParallel::.*",
                ),
            ),
        ),
    ),
    Suite(
        "transformer/test_mlp.py",
        ranks=1,
        passed=1,
        quick=True,
        left_out=(LeftOut("cuda_device", 1, ("TestParallelMLP::test_gpu_forward",)),),
    ),
    Suite("transformer/test_module.py", ranks=1, passed=3, quick=True),
    Suite(
        "transformer/test_multi_token_prediction.py",
        ranks=8,
        passed=7,
        skipped=25,
        left_out=(
            LeftOut(
                "te", 4, ("TestMultiTokenPredictionLayer::test_constructor_ues_te.*",)
            ),
        ),
    ),
    Suite("transformer/test_quantization_config.py", ranks=1, passed=1, skipped=4),
    Suite("transformer/test_relative_attention.py", ranks=1, passed=2),
    Suite(
        "transformer/test_transformer_block.py",
        ranks=1,
        passed=36,
        left_out=(
            LeftOut(
                "te",
                12,
                (
                    "TestParallelTransformerBlock::.*",
                    "TestProcessGroupTransformerBlock::.*",
                    "TestMixedProcessGroups::.*",
                    "TestPipelineParallelLayoutTransformerBlock::test_layout_layer_number.*",
                ),
            ),
        ),
    ),
    Suite(
        "transformer/test_transformer_block_custom_pgs.py",
        ranks=1,
        passed=1,
        skipped=1,
        left_out=(
            LeftOut("te", 26, (r"TestTransformerBlockWithProcessGroups::.*\[.*",)),
        ),
    ),
    Suite(
        "transformer/test_utils.py",
        ranks=1,
        passed=12,
        left_out=(LeftOut("te", 1, (".*test_post_process_forward",)),),
    ),
    Suite("data/test_builder.py", ranks=1, passed=145, skipped=48),
    Suite("data/test_gpt_dataset.py", ranks=1, passed=1),
    Suite("data/test_multimodal_dataset.py", ranks=1, passed=1),
    Suite("fusions/test_bias_dropout_fusion.py", ranks=1, passed=4),
    Suite("fusions/test_swiglu_fusion.py", ranks=1, passed=2),
    Suite("fusions/test_torch_softmax.py", ranks=1, passed=14),
    Suite("fusions/test_weighted_squared_relu_fusion.py", ranks=1, passed=2),
    Suite("inference/contexts/test_dynamic_context.py", ranks=2, passed=28),
    Suite(
        "inference/model_inference_wrappers/test_model_inference_wrapper_config.py",
        ranks=1,
        passed=1,
    ),
    Suite("inference/test_common_inference_params.py", ranks=1, passed=1),
    Suite("inference/test_flash_decode.py", ranks=1, passed=1),
    Suite("inference/test_inference_utils.py", ranks=1, passed=1),
    Suite("inference/test_scheduler.py", ranks=1, passed=1),
    Suite("inference/test_stop_words.py", ranks=1, passed=19),
    Suite(
        "models/test_base_embedding.py",
        ranks=1,
        passed=3,
        left_out=(LeftOut("cuda_device", 1, ("TestBaseEmbedding::test_gpu_forward",)),),
    ),
    Suite(
        "models/test_clip_vit_model.py",
        ranks=1,
        passed=4,
        left_out=(LeftOut("te", 4, ("TestCLIPViTModel::.*",)),),
    ),
    Suite(
        "models/test_llava_model.py",
        ranks=1,
        passed=6,
        left_out=(
            LeftOut(
                "ranks",
                4,
                (
                    "TestLLaVAModelTokenParallel::test_process_embedding_token_parallel.*",
                ),
            ),
            LeftOut(
                "te", 11, ("TestLLaVAModel::.*", "TestLLaVAModelVisionEncoders::.*")
            ),
        ),
    ),
    Suite("models/test_mimo_embedding_alignment.py", ranks=1, passed=5),
    Suite(
        "models/test_t5_model.py",
        ranks=1,
        passed=5,
        left_out=(LeftOut("te", 9, ("TestT5Model::.*",)),),
    ),
    Suite("optimizer/test_optimizer_config.py", ranks=1, passed=1),
    Suite("ssm/test_mamba_hybrid_layer_allocation.py", ranks=1, passed=1, skipped=2),
    Suite("test_api_backwards_compat_setup.py", ranks=1, passed=6),
    Suite("test_argument_utils.py", ranks=1, passed=33, quick=True),
    Suite("test_basic.py", ranks=1, passed=1),
    Suite(
        "test_checkpointing.py",
        ranks=1,
        passed=8,
        left_out=(LeftOut("fsdp", 1, (r"test_save_checkpoint\[fsdp_dtensor\]",)),),
    ),
    Suite(
        "test_hyper_comm_grid.py",
        ranks=8,
        passed=20,
        left_out=(
            LeftOut(
                "order",
                7,
                (
                    "TestHyperCommGrid::test_(create_pg|get_pg_(success|mul)|end_to_end).*",
                ),
            ),
        ),
    ),
    Suite("test_imports.py", ranks=1, passed=1),
    Suite("test_num_microbatches_calculator.py", ranks=1, passed=14, quick=True),
    Suite("test_optimizer_param_scheduler.py", ranks=1, passed=18),
    Suite(
        "test_parallel_state.py",
        ranks=8,
        passed=77,
        left_out=(
            LeftOut(
                "rank_order",
                3,
                (
                    r"test_different_initialize_order_unconsistency\[(src_tp_pp3-2|src_tp_pp4-2|src_tp_pp5-2)\]",
                ),
            ),
        ),
    ),
    Suite("test_process_groups_config.py", ranks=1, passed=5),
    Suite("test_training.py", ranks=1, passed=3),
    Suite("utils/test_experimental_log_once.py", ranks=1, passed=2),
)

_LATER = {
    "dist_checkpointing/test_async_save.py": LeftOut(
        "package", 1, (r"TestAsyncSave::test_get_async_strategy\[nvrx\]",)
    ),
    "inference/contexts/test_dynamic_context.py": LeftOut(
        "cuda_device",
        1,
        ("TestDynamicContext::test_async_sched_commit_sampled_tokens",),
    ),
    "test_parallel_state.py": LeftOut(
        "gloo_race", 1, ("test_expert_all_gather_group",)
    ),
}
"""Tests that later releases added to these files and that cannot pass on CPU ranks, as of
0.19.0."""


def suites_for(pinned: bool) -> tuple[Suite, ...]:
    """Return the files to run, for the tree of the pinned tag or of a later release.

    A later release has different numbers of tests, so there only failing tests count as failures.
    """
    if pinned:
        return SUITES
    return tuple(
        replace(
            suite,
            counted=False,
            # From 0.17 on one of its tests needs eight tensor-parallel ranks.
            ranks=8
            if suite.file == "inference/contexts/test_dynamic_context.py"
            else suite.ranks,
            left_out=suite.left_out
            + ((_LATER[suite.file],) if suite.file in _LATER else ()),
        )
        for suite in SUITES
    )
