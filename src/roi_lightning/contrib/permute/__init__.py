"""Hidden channels of a model in an order that N:M masks lose less in; the model computes as before."""
