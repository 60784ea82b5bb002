"""Checks of the parts that Headrace is built from: advisories, bills of materials, digests of images."""
