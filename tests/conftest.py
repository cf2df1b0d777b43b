"""What every test, kernel and rank started from here shares: one thread, and the same random cases each time."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; a sum's last digits depend on the number of threads
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # notebooks run in this environment, whatever kernels the user has

import hypothesis

hypothesis.settings.register_profile("course", derandomize=True, deadline=None)
hypothesis.settings.load_profile("course")
