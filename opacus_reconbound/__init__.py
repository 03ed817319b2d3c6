"""opacus_reconbound."""
