"""planaria trains large language models on machines that come and go.

The packages in here are the folders of the same names at the repository's top: `recovery`,
`bootstrap`, `node` and `lab`, of which each imports only those before it, and `corpus`, the prose
of the first run. CONTRIBUTING.md has the map.
"""
