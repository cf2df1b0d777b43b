"""The tested implementations behind the labs: one module per concept, and each reads as a phrase (`zero.partition`, `floats.FP16.max`)."""
