"""The laboratory: data, training, sweeps, reports and the papers' experiments, around the mixers of the library."""
