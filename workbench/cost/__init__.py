"""Predicted costs of training steps: seconds by part, and memory by kind. No torch, no devices."""
