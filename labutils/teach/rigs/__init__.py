"""What builds, runs, compares and prints the experiments of the labs: `rigs.zero.three_results`.
What is taught lies in the topics; a rig puts it to work."""

from labutils.teach.rigs import (
    checkpointing,
    copies,
    corpus,
    data_parallel,
    expert_parallel,
    fp8,
    lora,
    occupancy,
    pipeline,
    precision,
    profiles,
    quantization,
    scaling,
    tensor_parallel,
    zero,
)
