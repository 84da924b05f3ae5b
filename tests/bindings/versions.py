"""The releases of full TensorRT that are tested. A new one is a number added here."""

#: As the package index has them. 10.3 and 10.4: plugins with aliased outputs, and the release that mends their destruction (10.3 is that
#: of JetPack 6.1 and 6.2). 10.13 (JetPack 7), 10.15: KVCacheUpdate. 10.16: the last one before 11.0, which has causal attention over a
#: cache. 11.1: plugins compiled ahead of time still need attributes that are arrays; 11.4: the newest.
VERSIONS = ("10.3.0", "10.4.0", "10.13.3.9", "10.15.1.29", "10.16.1.11", "11.0.0.114", "11.1.0.106", "11.4.0.106")
