"""What benches and the tests of real faults stand on: processes, bad links, slow strategies, peers, floors."""
