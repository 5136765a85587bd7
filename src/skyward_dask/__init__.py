"""The Dask front-end: `SkywardCluster` comes with a later version."""
