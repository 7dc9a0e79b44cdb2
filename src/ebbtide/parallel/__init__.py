"""Training one model with several ranks: their communication, FSDP, tensor parallelism, and how work is partitioned."""
