"""The numbers that the gated delta rule's kernels and what calls them share; no torch."""

KERNEL_CHANNELS = 16, 32, 64, 128, 256  # of the heads that the kernels compute
EPSILON = 1e-6  # of the norms of queries and keys

# Tokens. For matmuls of a multiple of 64 rows by four warps, Triton uses the instructions of Hopper GPUs that run on
# beside the program (wgmma). Since its version 3.4, kernels of this rule are miscompiled with them: gradients are wrong
# where the kernel computed an operand, or memory is read that is not its own (flash-linear-attention's issues 640 and
# 984, Triton's 11366 and 11781). For 32 rows, or by two warps, it uses the instructions of earlier GPUs.
CHUNK = 32

# Numbers of a part of a state [K, some of V's channels] that a program has at once: compiled for Hopper GPUs and heads
# of 128 channels, the scans then fit the registers (203 to 255 of each thread), and with twice the part they do not.
PART, SMALLEST = 2048, 16  # and the least channels that a matmul can have
SCAN_WARPS, WARPS = 2, 4  # With more warps a scan has matmuls by wgmma.
