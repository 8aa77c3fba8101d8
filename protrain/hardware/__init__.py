"""What a machine can do, as measured by ``calibrate``, shipped for known GPUs, or detected."""
