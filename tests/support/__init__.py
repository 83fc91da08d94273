"""What tests share: the multi-rank launcher, builders of synthetic runs and journals."""
