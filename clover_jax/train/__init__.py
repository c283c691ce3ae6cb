"""One-device training: AR pre-training, calibration of the block operator, conversion."""
