"""The parts of setup.py that find torch and CUDA and describe the modules; not part of the installed package."""
