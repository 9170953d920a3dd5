"""planaria trains large language models on machines that come and go.

The packages in here are the folders of the same names beside this one.
"""
