"""`headwise demo`: the tour of a trained translator, in `sample_tour`."""
