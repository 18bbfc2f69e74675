"""Found by Python itself at the start of every process whose PYTHONPATH names this folder."""

from cuda_stand_in import install

install()
