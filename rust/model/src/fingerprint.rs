//! Fingerprint of everything besides tokens that affects the KV cache contents.
//!
//! Pages that were kept on disk or in a saved state are reused only by a model that would compute the same bits. A
//! fine-tuned model has the same shapes and names, so the packed weights themselves are hashed, on all threads, because
//! a server does this while its users wait.

use std::hint::black_box;
use std::ops::Range;
use std::sync::OnceLock;

use ferrule_kernels::{ARITHMETIC_VERSION, Cancel, PackedMatrix, Pool};

use crate::rope::RopeRows;
use crate::spec::ModelSpec;
use crate::transformer::LoadOptions;
use crate::weights::{Tensors, TokenTable, Weights};

/// Bytes per task: large enough to make the cost of a task negligible, small enough to balance threads.
const CHUNK_BYTES: usize = 4 << 20;

/// Bytes of a table that are read before their memory is released.
const TABLE_PART_BYTES: usize = 256 << 20;

/// Number of positions whose rotary embeddings are hashed.
const ROPE_SAMPLES: usize = 256;

/// Number of arguments of exponentials and logarithms that are hashed.
const MATH_SAMPLES: usize = 256;

/// Computes the fingerprint of some layers of a model. The length of every part is hashed or follows from the spec, so
/// that two models never hash the same bytes.
pub(crate) fn fingerprint(
    spec: &ModelSpec,
    layers: Range<usize>,
    weights: &Weights,
    options: LoadOptions,
    pool: &Pool,
) -> [u8; 32] {
    let mut hasher = Parts::new("ferrule fingerprint of a model");
    hasher.number(ARITHMETIC_VERSION as usize);
    hasher.bytes(env!("CARGO_PKG_VERSION").as_bytes());
    hasher.bytes(&serde_json::to_vec(spec).expect("a spec consists of numbers, names and lists"));
    hasher.number(layers.start);
    hasher.number(layers.end);
    hasher.bytes(options.quantization.name().as_bytes());
    hasher.bytes(options.kv_format.name().as_bytes());
    hasher.bytes(options.isa.arithmetic_name().as_bytes());
    hasher.math(spec);
    let Tensors { matrices, vectors } = weights.tensors();
    vectors.iter().for_each(|vector| hasher.floats(vector));
    matrices.iter().for_each(|matrix| hasher.shape(matrix));
    let buffers: Vec<_> = matrices.iter().flat_map(|matrix| matrix.buffers()).collect();
    hasher.chunks(&buffers, pool);
    for table in weights.tables.iter().filter_map(TokenTable::stored) {
        hasher.bytes(table.format().name().as_bytes());
        // A part at a time, because the table need not fit in memory.
        for part in table.bytes().chunks(TABLE_PART_BYTES) {
            hasher.chunks(&[part], pool);
            table.release_all();
        }
    }
    hasher.finish()
}

/// Computes the fingerprint of the system's math library, in which workers of one model must be alike.
pub(crate) fn math_fingerprint(spec: &ModelSpec) -> [u8; 32] {
    let mut hasher = Parts::new("ferrule fingerprint of a math library");
    hasher.math(spec);
    hasher.finish()
}

/// Computes the fingerprint of what each of the workers has that divide the rows of matrices: all of the model but the
/// matrices.
pub(crate) fn shared_fingerprint(spec: &ModelSpec, layers: Range<usize>, weights: &Weights) -> [u8; 32] {
    let mut hasher = Parts::new("ferrule fingerprint of tensor-parallel workers");
    hasher.bytes(&serde_json::to_vec(spec).expect("a spec consists of numbers, names and lists"));
    hasher.number(layers.start);
    hasher.number(layers.end);
    weights.tensors().vectors.iter().for_each(|vector| hasher.floats(vector));
    hasher.finish()
}

/// Returns the hash of each chunk of all buffers, in order.
fn hashes_of_chunks(buffers: &[&[u8]], pool: &Pool) -> Vec<blake3::Hash> {
    let chunks: Vec<&[u8]> = buffers.iter().flat_map(|bytes| bytes.chunks(CHUNK_BYTES)).collect();
    let hashes: Vec<OnceLock<blake3::Hash>> = vec![OnceLock::new(); chunks.len()];
    let hash = |index: usize| hashes[index].get_or_init(|| blake3::hash(chunks[index]));
    // Compute here what the pool did not (nothing in practice: hashing does not panic and is not cancelled).
    let task = |index| {
        hash(index);
    };
    let _ = pool.run(chunks.len(), &task, &Cancel::new());
    (0..chunks.len()).map(|index| *hash(index)).collect()
}

/// A hasher that separates its parts, so that moving bytes from one part to the next changes the hash.
pub(crate) struct Parts(blake3::Hasher);

impl Parts {
    /// Creates a hasher for the purpose that `context` names.
    pub fn new(context: &str) -> Self {
        Self(blake3::Hasher::new_derive_key(context))
    }

    pub fn number(&mut self, number: usize) {
        self.0.update(&(number as u64).to_le_bytes());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        self.0.update(bytes);
    }

    pub fn floats(&mut self, floats: &[f32]) {
        let bytes: Vec<u8> = floats.iter().flat_map(|float| float.to_le_bytes()).collect();
        self.bytes(&bytes);
    }

    /// Hashes samples of the functions that come from the system's math library, which differs between systems: powers,
    /// sines and cosines of rotary embeddings, exponentials and logarithms.
    fn math(&mut self, spec: &ModelSpec) {
        let mut rows = RopeRows::default();
        let positions = (0..ROPE_SAMPLES).map(|i| (i * (spec.max_position_embeddings / ROPE_SAMPLES).max(1), 1));
        for rope in &spec.ropes {
            rows.fill(rope, positions.clone());
            self.floats(&rows.cos);
            self.floats(&rows.sin);
        }
        for index in 0..MATH_SAMPLES {
            // Not computed by the compiler, which has its own functions.
            let x = black_box(0.371 * (index as f32 - MATH_SAMPLES as f32 / 2.0));
            self.floats(&[x.exp(), x.exp_m1(), x.exp().ln_1p(), (-x.abs()).exp().ln_1p()]);
            let x = f64::from(x);
            for number in [x.exp(), x.exp().ln_1p()] {
                self.bytes(&number.to_le_bytes());
            }
        }
    }

    /// Hashes the chunks of some buffers, whose lengths are known.
    fn chunks(&mut self, buffers: &[&[u8]], pool: &Pool) {
        for hash in hashes_of_chunks(buffers, pool) {
            self.bytes(hash.as_bytes());
        }
    }

    /// Hashes the shape and the formats of a matrix.
    pub fn shape(&mut self, matrix: &PackedMatrix) {
        self.number(matrix.rows());
        self.number(matrix.cols());
        for (format, panels) in matrix.formats() {
            self.bytes(format.name().as_bytes());
            self.number(panels);
        }
    }

    pub fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::num::NonZeroUsize;
    use std::sync::Arc;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::kv::KvFormat;
    use ferrule_kernels::{Exec, Format, RowSource};
    use serde_json::json;

    use super::*;
    use crate::mixers::MixerWeights;
    use crate::quantization::Quantization;
    use crate::specs;
    use crate::weights::{Loader, Source};

    /// Returns a spec with biases and norms, and with `scaling` in its rotary embedding.
    fn spec(scaling: &serde_json::Value) -> ModelSpec {
        let mut spec = specs::llama(320, 2);
        let norm = json!({"type": "layer", "eps": 1e-5, "weight_offset": 0.0, "weight": true, "bias": true});
        for layer in spec["layers"].as_array_mut().unwrap() {
            layer["blocks"][0]["norm"] = norm.clone();
            layer["blocks"][1]["norm"] = norm.clone();
            layer["blocks"][1]["mixer"]["bias"] = json!(true);
            layer["blocks"][0]["mixer"]["output_bias"] = json!(true);
            layer["blocks"][0]["mixer"]["projections"]["bias"] = json!(true);
            let rms = json!({"type": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight": true});
            layer["blocks"][0]["mixer"]["projections"]["qk_norm"] =
                json!({"norm": rms, "over": "head", "after_rope": false});
        }
        spec["final_norm"] = norm;
        spec["lm_head"] = json!({"tied": false, "bias": true, "scale": 1.0, "softcap": null});
        spec["ropes"][0]["scaling"] = scaling.clone();
        ModelSpec::from_json(&spec.to_string()).unwrap()
    }

    struct Ones;

    impl RowSource for Ones {
        fn read_row(&self, _: usize, out: &mut [f32]) {
            out.fill(1.0);
        }
    }

    #[test]
    fn everything_that_affects_the_kv_cache_changes_the_fingerprint() {
        let plain = spec(&json!({"type": "none"}));
        let pools = [1, 3].map(|threads| Pool::new(NonZeroUsize::new(threads).unwrap()));
        let options = |quantization| LoadOptions { quantization, kv_format: KvFormat::F16, isa: Isa::best() };
        let options = options(Quantization::named("f32").unwrap());
        let load = |options: LoadOptions| {
            let exec = Exec { isa: options.isa, pool: &pools[0], cancel: &Cancel::new() };
            let loader = Loader::new(&plain, Source::Random, options.quantization);
            loader.load(exec, &mut |_, _| {}).unwrap()
        };
        let mut weights = load(options);
        let first = fingerprint(&plain, 0..2, &weights, options, &pools[0]);
        assert_eq!(first, fingerprint(&plain, 0..2, &load(options), options, &pools[1]));

        let mut all = BTreeSet::from([first]);
        let mut is_new = |fingerprint| assert!(all.insert(fingerprint));
        is_new(fingerprint(&spec(&json!({"type": "linear", "factor": 2.0})), 0..2, &weights, options, &pools[0]));
        is_new(fingerprint(&plain, 0..1, &weights, options, &pools[0]));
        for kv_format in [KvFormat::F32, KvFormat::Bf16, KvFormat::Int8] {
            is_new(fingerprint(&plain, 0..2, &weights, LoadOptions { kv_format, ..options }, &pools[0]));
        }
        let isas = Isa::available().into_iter().filter(|isa| isa.arithmetic_name() == isa.name());
        for isa in isas.filter(|isa| isa.name() != options.isa.arithmetic_name()) {
            is_new(fingerprint(&plain, 0..2, &weights, LoadOptions { isa, ..options }, &pools[0]));
        }
        for name in ["bf16", "int8", "int4"] {
            let options = LoadOptions { quantization: Quantization::named(name).unwrap(), ..options };
            is_new(fingerprint(&plain, 0..2, &load(options), options, &pools[0]));
        }
        let vectors = weights.tensors().vectors.len();
        // Per layer: two norms with weight and bias, norms of queries and keys, and four biases.
        assert_eq!(vectors, 2 * (4 + 2 + 4) + 2 + 1);
        let shared = shared_fingerprint(&plain, 0..2, &weights);
        weights.final_norm.as_mut().unwrap().bias.as_mut().unwrap()[63] = 0.5;
        assert_ne!(shared, shared_fingerprint(&plain, 0..2, &weights));
        is_new(fingerprint(&plain, 0..2, &weights, options, &pools[0]));
        Arc::get_mut(&mut weights.layers[1].blocks[0].block).unwrap().norm.as_mut().unwrap().bias.as_mut().unwrap()
            [0] = 0.5;
        is_new(fingerprint(&plain, 0..2, &weights, options, &pools[0]));
        let exec = Exec { isa: options.isa, pool: &pools[0], cancel: &Cancel::new() };
        let shared = shared_fingerprint(&plain, 0..2, &weights);
        let MixerWeights::Dense(ffn) = &mut Arc::get_mut(&mut weights.layers[1].blocks[1].block).unwrap().mixer else {
            panic!("the block is dense")
        };
        ffn.down.weight = PackedMatrix::pack(&exec, &[(Format::F32, 64)], 96, &Ones).unwrap();
        is_new(fingerprint(&plain, 0..2, &weights, options, &pools[0]));
        // Workers that divide matrices have different ones.
        assert_eq!(shared, shared_fingerprint(&plain, 0..2, &weights));
    }
}
