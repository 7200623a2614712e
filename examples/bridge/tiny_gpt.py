"""Trains a tiny GPT with Megatron-Bridge on four ranks, on GPUs or on the CPU.

    torchrun --nproc-per-node 4 examples/bridge/tiny_gpt.py zb-v

The argument is any schedule of `megatron-ext plan`. Without it, Bridge's own 1F1B runs.
"""

import sys

import megatron_ext  # must precede Bridge, which copies names that are patched

# isort: split
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain


def recipe(train_iters: int = 4) -> ConfigContainer:
    """Return the configuration: 8 layers on 4 pipeline ranks, 8 micro-batches of 32 tokens."""
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=8,
            hidden_size=64,
            num_attention_heads=4,
            seq_length=32,
            vocab_size=512,
            pipeline_model_parallel_size=4,
            position_embedding_type="rope",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_impl="local",
            transformer_layer_spec=local_layer_spec,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            bias_dropout_fusion=False,
        ),
        train=TrainingConfig(
            train_iters=train_iters, global_batch_size=8, micro_batch_size=1
        ),
        validation=ValidationConfig(eval_iters=1, eval_interval=train_iters),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-3, clip_grad=0.0
        ),
        scheduler=SchedulerConfig(
            lr_decay_iters=train_iters,
            lr_warmup_iters=0,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
        ),
        dataset=MockGPTDatasetConfig(
            random_seed=1,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=32,
            num_dataset_builder_threads=1,
            dataloader_type="single",
            num_workers=0,
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=512),
        checkpoint=CheckpointConfig(save=None),
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        megatron_ext.configure(megatron_ext.PipelineConfig(schedule=sys.argv[1]))
    pretrain(recipe(), forward_step)
