"""The Lightning callback without a namespace; ``lightning.py`` and ``pytorch_lightning.py`` give it one."""
