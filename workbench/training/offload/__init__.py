"""What a strategy's ``offload=`` keeps in the host's memory, and on CPUs in files on a disk."""
