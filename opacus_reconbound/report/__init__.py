"""Pictures. Needs matplotlib: ``pip install "opacus-reconbound[report]"``."""
