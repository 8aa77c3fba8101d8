"""A training step end to end, beside what others make of it on the same machine: ``python -m bench.train``.

contestants  who takes part, in which variants, by name
task         model, batch and steps that all of them get, and the tokens
models       the same model for all: weights, compiled and checkpointed blocks
low_precision
             4-bit weights of a frozen base, and products in float8
trainers     ProTrain, the compute-only floor, resident weights
fsdp2        FSDP2
peers        DeepSpeed, torchao
llmq         LLM.Q
clients      clients of ProTrain, which train by their own loops
peaks        the memory that a worker may take and takes
worker       one contestant in a process of its own, or one of its ranks
ranks        several GPUs: the processes' environments, and what their outcomes make together
launch       starts workers; what ends one (no memory, no time) becomes a row
results      rows, speedups, the printed table
"""
