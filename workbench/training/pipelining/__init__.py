"""One step of training or evaluation as micro-batches: ``step`` is what a user calls, ``executor`` runs one rank's
actions, ``micro_batches`` cuts the batch.
"""
