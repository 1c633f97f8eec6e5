//! Threads and weights that are placed on NUMA nodes compute the same logits.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use crate::specs;
use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::KvFormat;
use ferrule_kernels::{Cancel, Exec, Pool, machine};
use ferrule_model::{
    Batch, LanguageModel, LoadOptions, LogitRows, ModelSpec, Quantization, SequenceChunk, Transformer, WeightFiles,
    pack_into,
};

/// Packed file that is removed at the end.
struct Packed(PathBuf);

impl Drop for Packed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Computes the logits of the last of some tokens with weights from a packed file, or with random ones.
fn logits(spec: &ModelSpec, packed: Option<&Packed>, mmap: bool, pool: Pool) -> Vec<f32> {
    let options =
        LoadOptions { quantization: Quantization::named("int4").unwrap(), kv_format: KvFormat::F32, isa: Isa::best() };
    let files = WeightFiles::open(packed.map(|file| file.0.as_path()), spec, mmap).unwrap();
    let (pool, cancel) = (Arc::new(pool), Cancel::new());
    let mut model =
        Transformer::load(spec.clone(), files.source(false), options, pool, &cancel, &mut |_, _| {}).unwrap();
    model.allocate_kv(&[2]).unwrap();
    let tokens: Vec<u32> = (0..19).collect();
    let sequence = SequenceChunk {
        tokens: &tokens,
        first_position: 0,
        prompt_len: tokens.len(),
        pages: &[vec![0, 1]],
        token_types: &[],
        features: &[],
        logits: LogitRows::Last,
        adapter: None,
    };
    let mut logits = Vec::new();
    model.forward(Batch { sequences: &[sequence] }, &cancel, &mut logits).unwrap();
    logits
}

#[test]
fn placed_weights_give_the_same_logits() {
    let spec = ModelSpec::from_json(&specs::llama(96, 2).to_string()).unwrap();
    let two = NonZeroUsize::new(2).unwrap();
    // A machine with one processor has it in both nodes.
    let processors: Vec<usize> = machine::numa_nodes().into_iter().flatten().collect();
    let nodes = [processors.first(), processors.last()].map(|processor| vec![*processor.unwrap()]);
    let placed = || {
        let pool = Pool::on_nodes(two, &nodes);
        assert_eq!(pool.nodes(), 2);
        pool
    };
    let expected = logits(&spec, None, true, Pool::new(two));
    assert!(expected.iter().any(|logit| *logit != 0.0));
    assert_eq!(logits(&spec, None, true, placed()), expected, "random weights");

    let packed = Packed(std::env::temp_dir().join(format!("ferrule-nodes-{}.safetensors", std::process::id())));
    let (pool, cancel, random) = (placed(), Cancel::new(), WeightFiles::open(None, &spec, true).unwrap());
    let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
    let int4 = Quantization::named("int4").unwrap();
    pack_into(&packed.0, &spec, random.source(false), int4, &BTreeMap::new(), exec, &mut |_, _| {}).unwrap();
    for mmap in [true, false] {
        assert_eq!(logits(&spec, Some(&packed), mmap, placed()), expected, "mmap: {mmap}");
    }
    let now: Vec<usize> = machine::numa_nodes().into_iter().flatten().collect();
    assert_eq!(now, processors, "this thread is free again");
}
