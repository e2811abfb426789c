"""What steps cost on which hardware: seconds by part, and memory by kind. No torch, no devices."""
