import numpy as np, pytest, random
from tests.kernels.attention import Case, check, GRID, PREFILL_CASES

def rand(seed):
    r = random.Random(seed)
    group = r.choice([1,2,3,4,7,8,16]); D = r.choice([64,80,128,256]); 
    dtype = {64:"float16",80:"bfloat16",128:"float16",256:"float16"}[D]
    slots = r.choice([1,2,3]); width=r.choice([2,3,5,8,16,17,33,40,70,150])
    tokens = r.choice([200, 700, 1500])
    lengths = tuple(r.choice([0, r.randrange(tokens), tokens-width, tokens-1]) for _ in range(slots))
    new = r.choice([None, tuple(r.randrange(0,width+1) for _ in range(slots))])
    return Case(lengths=lengths,new=new,width=min(width,tokens),tokens=tokens,kv_heads=r.choice([1,2]),group=group,head_dim=D,dtype=dtype,
      rotary_dim=r.choice([None,0,32,16]),window=r.choice([0,0,0,1,20,130,600]),softcap=r.choice([0.0,0.0,5.0]),layout=r.choice(["combined","separate"]),packed=r.choice([False,True]))

@pytest.mark.parametrize("sm",[2,6])
@pytest.mark.parametrize("seed",range(60))
def test_random(memory, stream, monkeypatch, seed, sm):
    monkeypatch.setattr(memory, "multiprocessor_count", sm, raising=False)
    check(rand(seed), memory, stream, seed)
