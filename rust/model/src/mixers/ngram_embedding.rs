//! Embedding of hashed n-grams (Qwen4, Qwen Team 2026), on all residual streams side by side.
//!
//! The last tokens of each row select rows of tables, by several hashes each of the last two tokens, the last three and so
//! on. With `e` the selected rows, joined, and `s_i` stream i, its gate is `g_i = sigmoid(root(key_norm(key(e)_i) .
//! query_norm(s_i) / sqrt(width)))`, where `root(x)` is the square root of `max(|x|, 1e-6)` with the sign of x. The output
//! is `v + silu(convolution(kernel_norm(v)))` with `v_i = g_i * value(e)`. Each norm has a weight of its own for each
//! stream.
//!
//! Tokens before the first one of the sequence, and all up to a token that ends a text, count as that token. The state is
//! the last inputs of the convolution, then the last tokens.

use ferrule_kernels::activation::{Activation, activate};
use ferrule_kernels::elementwise::add;
use ferrule_kernels::scan::{Segment, causal_convolution};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::convolution::Convolution;
use super::{At, Mixer, MixerPass, TableColumns};
use crate::layer::{adapted, for_rows, norm_heads};
use crate::limits::{SpecError, require, size};
use crate::memory::{Memory, MemoryNeed};
use crate::rope::RopeSpec;
use crate::spec::{NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Smallest magnitude of a gate's root.
const MIN_MAGNITUDE: f64 = 1e-6;

/// Upper limit for the length of an n-gram, above that of any known model.
const MAX_NGRAM: usize = 16;

/// Upper limit for the number of hashes, above that of any known model.
const MAX_HASHES: usize = 1024;

/// Embedding of hashed n-grams.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NgramEmbeddingSpec {
    /// Width of a residual stream.
    pub width: usize,
    /// Number of residual streams.
    pub streams: usize,
    /// Index of the first table in [`crate::ModelSpec::tables`]. The rows of all tables follow one another; all but the
    /// last have the same number of rows.
    pub first_table: usize,
    /// Number of tables.
    pub tables: usize,
    /// Columns of the tables.
    pub columns: usize,
    /// Multiplier of the hashes for each token of the longest n-gram, from the row's own token backwards. The hash of an
    /// n-gram is the exclusive or of the products, as signed integers of 64 bits that wrap around.
    pub multipliers: Vec<i64>,
    /// Rows of each hash, which is taken modulo their number; those of the next hash follow. An equal number of hashes for
    /// each length of an n-gram, from two tokens on.
    pub hash_rows: Vec<usize>,
    /// Token that ends a text.
    pub end: u32,
    /// Norm of keys, queries and the inputs of the convolution.
    pub norm: NormSpec,
    /// Number of inputs that an output of the convolution depends on.
    pub taps: usize,
    /// Number of rows from one of these inputs to the next.
    pub dilation: usize,
}

/// Weights of an embedding of n-grams.
pub(crate) struct NgramEmbedding<M = PackedMatrix> {
    key: Linear<M>,
    value: Linear<M>,
    key_norm: Norm,
    query_norm: Norm,
    kernel_norm: Norm,
    convolution: Convolution,
}

/// Buffers of an embedding of n-grams. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Rows of the tables: `[rows, hashes]`.
    found: Vec<usize>,
    /// The same rows' elements, joined.
    vectors: Scratch<f32>,
    keys: Scratch<f32>,
    values: Scratch<f32>,
    /// Normed streams, then normed inputs of the convolution.
    normed: Scratch<f32>,
    /// `[rows, streams]`
    gates: Scratch<f32>,
}

impl NgramEmbeddingSpec {
    fn all_width(&self) -> usize {
        self.streams * self.width
    }

    /// Returns the length of the joined rows of the tables.
    fn vector_len(&self) -> usize {
        self.hash_rows.len() * self.columns
    }

    /// Returns the floats of the convolution's state.
    fn convolution_state(&self) -> usize {
        Convolution::state_len(self.all_width(), Convolution::spread_taps(self.taps, self.dilation))
    }

    /// Returns the constants of the hashes by role: multipliers, rows of each hash, and the first of these rows.
    fn constants(&self) -> [(&'static str, Vec<i64>); 3] {
        let rows: Vec<_> = self.hash_rows.iter().map(|rows| *rows as i64).collect();
        let first_rows = rows.iter().scan(0, |end, rows| Some(std::mem::replace(end, *end + rows))).collect();
        [("multipliers", self.multipliers.clone()), ("hash_rows", rows), ("first_rows", first_rows)]
    }

    /// Returns the number of tokens before a row's own that it depends on.
    fn tokens_before(&self) -> usize {
        self.multipliers.len() - 1
    }

    /// Writes the rows of the tables that the last of `tokens` selects; the others are those before it.
    fn hash(&self, tokens: &[u32], found: &mut [usize]) {
        let mut tokens = tokens.iter().rev();
        let mut multipliers = self.multipliers.iter();
        let mut product = |token: u32| multipliers.next().map_or(0, |multiplier| multiplier.wrapping_mul(token.into()));
        let mut hash = product(tokens.next().copied().unwrap_or(self.end));
        let mut is_over = false;
        let mut first_row = 0;
        let hashes_per_length = self.hash_rows.len() / self.tokens_before();
        let lengths = self.hash_rows.chunks(hashes_per_length).zip(found.chunks_mut(hashes_per_length));
        for ((row_counts, found), token) in lengths.zip(tokens) {
            is_over |= *token == self.end;
            hash ^= product(if is_over { self.end } else { *token });
            for (rows, found) in row_counts.iter().zip(found) {
                *found = first_row + hash.rem_euclid(*rows as i64) as usize;
                first_row += rows;
            }
        }
    }

    /// Selects the rows of the tables for all rows of a batch and writes the states after them. The states begin in the
    /// first columns of the view.
    fn find(&self, tokens: &[u32], segments: &[Segment], states: RowsMut<'_>, found: &mut Vec<usize>) {
        let (before, hashes) = (self.tokens_before(), self.hash_rows.len());
        found.clear();
        found.resize(tokens.len() * hashes, 0);
        let RowsMut { data, stride, first } = states;
        let mut all = Vec::new();
        for Segment { first_row, rows, old, new } in segments {
            all.clear();
            // A token is stored by its bits; it is too small to be the bits of a number that is not finite.
            match old {
                Some(old) => all.extend(data[old * stride + first..][..before].iter().map(|x| x.to_bits())),
                None => all.extend(std::iter::repeat_n(self.end, before)),
            }
            all.extend_from_slice(&tokens[*first_row..][..*rows]);
            let found = found[first_row * hashes..].chunks_exact_mut(hashes);
            for (window, found) in all.windows(before + 1).zip(found) {
                self.hash(window, found);
            }
            let state = &mut data[new * stride + first..][..before];
            state.iter_mut().zip(&all[*rows..]).for_each(|(x, token)| *x = f32::from_bits(*token));
        }
    }

    /// Reads the selected rows of the tables, and releases their memory.
    fn read(&self, pass: &MixerPass<'_>, found: &[usize], vectors: &mut [f32]) -> Result<(), PoolError> {
        let tables = &pass.tables[self.first_table..][..self.tables];
        // The check of a table's spec keeps its rows within 32 bits.
        let place = |row: usize| (&tables[row / tables[0].spec.rows], (row % tables[0].spec.rows) as u32);
        let of_row =
            |row: usize| found[row * self.hash_rows.len()..][..self.hash_rows.len()].iter().map(|row| place(*row));
        for_rows(&pass.exec, pass.rows.count, vectors, self.vector_len(), |row, out| {
            for ((table, row), out) in of_row(row).zip(out.chunks_exact_mut(self.columns)) {
                table.read(row, 0, out);
            }
            of_row(row).for_each(|(table, row)| table.release(row));
        })
    }
}

impl Mixer for NgramEmbeddingSpec {
    type Weights<M> = NgramEmbedding<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
        let Self { width, tables, columns, taps, dilation, norm, .. } = *self;
        require(&format!("{path}.width"), width, width == hidden_size, || format!("hidden_size ({hidden_size})"))?;
        let tokens_to_end = (self.end as usize).saturating_add(1);
        for (name, number) in [("tables", tables), ("columns", columns), ("end + 1", tokens_to_end)] {
            size(&format!("{path}.{name}"), number)?;
        }
        let (tokens, hashes) = (self.multipliers.len(), self.hash_rows.len());
        require(&format!("{path}.multipliers (their number)"), tokens, (2..=MAX_NGRAM).contains(&tokens), || {
            format!("in 2..={MAX_NGRAM}")
        })?;
        let fits = (1..=MAX_HASHES).contains(&hashes) && hashes.is_multiple_of(tokens - 1);
        require(&format!("{path}.hash_rows (their number)"), hashes, fits, || {
            format!("a multiple of {} in 1..={MAX_HASHES}", tokens - 1)
        })?;
        for (i, rows) in self.hash_rows.iter().enumerate() {
            size(&format!("{path}.hash_rows[{i}]"), *rows)?;
        }
        size(&format!("{path}.hash_rows (their number) * columns"), hashes.saturating_mul(columns))?;
        check_norm(&format!("{path}.norm"), Some(norm))?;
        Convolution::check(path, taps)?;
        require(&format!("{path}.dilation"), dilation, (1..=MAX_NGRAM).contains(&dilation), || {
            format!("in 1..={MAX_NGRAM}")
        })
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<NgramEmbedding<P::Matrix>, LoadError> {
        for (role, constants) in self.constants() {
            loader.check_constants(&format!("{at}{role}"), &constants)?;
        }
        let (all, usual) = (self.all_width(), loader.usual());
        let mut linear = |role: &str, rows| loader.linear(packer, at, &[(role, rows, usual)], self.vector_len(), false);
        let norm = |role: &str| loader.norm(&format!("{at}{role}"), self.norm, all);
        Ok(NgramEmbedding {
            key: linear("key", all)?,
            value: linear("value", self.width)?,
            key_norm: norm("key_norm")?,
            query_norm: norm("query_norm")?,
            kernel_norm: norm("kernel_norm")?,
            convolution: Convolution::load(loader, at, all, self.taps, false)?.spread(self.dilation),
        })
    }

    fn list<'a, M>(weights: &'a NgramEmbedding<M>, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&weights.key);
        tensors.linear(&weights.value);
        [&weights.key_norm, &weights.query_norm, &weights.kernel_norm].into_iter().for_each(|norm| tensors.norm(norm));
        weights.convolution.list(tensors);
    }

    fn streams(&self) -> usize {
        self.streams
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        vec![MemoryNeed::State { floats: self.convolution_state() + self.tokens_before() }]
    }

    fn columns(&self) -> Option<TableColumns> {
        let tables = self.first_table..self.first_table.saturating_add(self.tables);
        Some(TableColumns { tables, first: 0, count: self.columns, hashed_rows: Some(self.hash_rows.iter().sum()) })
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        // The rows of the tables are numbers as long as two floats.
        rows * (2 * self.hash_rows.len() + self.vector_len() + 2 * self.all_width() + self.width + self.streams)
    }

    fn longest_input(&self, _: usize) -> usize {
        self.vector_len()
    }

    fn run(
        &self,
        weights: &NgramEmbedding,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { width, streams, .. } = *self;
        let (exec, rows, all) = (&pass.exec, pass.rows.count, self.all_width());
        let Buffers { found, vectors, keys, values, normed, gates } = buffers;
        let (segments, states) = pass.states(memory, self.convolution_state());
        self.find(&pass.rows.tokens, segments, states, found);
        let vectors = vectors.take(rows * self.vector_len());
        self.read(pass, found, vectors)?;

        let norm = |norm: &Norm, x: &mut [f32]| norm_heads(exec, norm, RowsMut::new(x, all, 0), streams, width);
        let keys = keys.take(rows * all);
        adapted(exec, &weights.key, pass.adapters, vectors, keys)?;
        norm(&weights.key_norm, keys)?;
        let normed = normed.take(rows * all);
        normed.copy_from_slice(x);
        norm(&weights.query_norm, normed)?;
        let gates = gates.take(rows * streams);
        for_rows(exec, rows, gates, streams, |row, gates| {
            let of_row = row * all..(row + 1) * all;
            let pairs = keys[of_row.clone()].chunks_exact(width).zip(normed[of_row].chunks_exact(width));
            for (gate, (key, query)) in gates.iter_mut().zip(pairs) {
                let product: f64 = key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum();
                *gate = root(product / (width as f64).sqrt());
            }
        })?;
        activate(exec, gates, Activation::Sigmoid)?;

        let values = values.take(rows * width);
        adapted(exec, &weights.value, pass.adapters, vectors, values)?;
        for_rows(exec, rows, out, all, |row, out| {
            let value = &values[row * width..][..width];
            for (stream, gate) in out.chunks_exact_mut(width).zip(&gates[row * streams..]) {
                stream.iter_mut().zip(value).for_each(|(x, value)| *x = gate * value);
            }
        })?;
        normed.copy_from_slice(out);
        norm(&weights.kernel_norm, normed)?;
        let convolution = weights.convolution.kernel(Some(Activation::Silu), None);
        let (segments, states) = pass.states(memory, 0);
        causal_convolution(exec, Rows::new(normed, all, 0), &convolution, segments, states, keys)?;
        add(exec, out, keys)
    }
}

/// Returns the square root of the magnitude of x, with its sign.
fn root(x: f64) -> f32 {
    if x == 0.0 { 0.0 } else { x.abs().max(MIN_MAGNITUDE).sqrt().copysign(x) as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An embedding of pairs and triples, with two hashes each.
    fn spec() -> NgramEmbeddingSpec {
        NgramEmbeddingSpec {
            width: 4,
            streams: 2,
            first_table: 0,
            tables: 1,
            columns: 1,
            multipliers: vec![i64::MAX, 5, 7],
            hash_rows: vec![11, 13, 17, 19],
            end: 2,
            norm: NormSpec::Rms { eps: 1e-6, weight_offset: 1.0, weight: true },
            taps: 2,
            dilation: 3,
        }
    }

    /// Returns the rows that tokens select, by arithmetic in 128 bits.
    fn expected(tokens: [i128; 3]) -> Vec<usize> {
        let wrapped = |x: i128| (x + (1 << 63)).rem_euclid(1 << 64) - (1 << 63);
        let products = [(i128::from(i64::MAX), tokens[0]), (5, tokens[1]), (7, tokens[2])].map(|(m, t)| wrapped(m * t));
        let (pair, triple) = (products[0] ^ products[1], products[0] ^ products[1] ^ products[2]);
        [(pair, 11, 0), (pair, 13, 11), (triple, 17, 24), (triple, 19, 41)]
            .map(|(hash, size, first)| hash.rem_euclid(size) as usize + first)
            .to_vec()
    }

    #[test]
    fn tokens_up_to_the_end_of_a_text_count_as_its_end() {
        let found = |tokens: [u32; 3]| {
            let mut found = vec![0; 4];
            spec().hash(&tokens, &mut found);
            found
        };
        assert_eq!(found([5, 6, 9]), expected([9, 6, 5]));
        assert_eq!(found([5, 2, 9]), expected([9, 2, 2]));
        assert_eq!(found([2, 6, 9]), expected([9, 6, 2]));
        // The row's own token may be the end.
        assert_eq!(found([5, 6, 2]), expected([2, 6, 5]));
    }

    #[test]
    fn rows_are_selected_alike_in_any_segments() {
        let (spec, tokens) = (spec(), [4, 9, 2, 7, 7, 300, 2, 1]);
        let select = |cuts: &[usize]| {
            let mut states = vec![f32::NAN; 9 * 3];
            let mut found = Vec::new();
            let ends = cuts.iter().copied().chain([tokens.len()]);
            let starts = std::iter::once(0).chain(cuts.iter().copied());
            let segments: Vec<_> = starts
                .zip(ends)
                .enumerate()
                .map(|(i, (start, end))| Segment { first_row: start, rows: end - start, old: i.checked_sub(1), new: i })
                .collect();
            spec.find(&tokens, &segments, RowsMut::new(&mut states, 3, 1), &mut found);
            found
        };
        let whole = select(&[]);
        assert_eq!(whole[..4], expected([4, 2, 2]));
        assert_eq!(whole[4 * 4..5 * 4], expected([7, 7, 2]));
        for cuts in [&[1][..], &[4], &[1, 2, 3, 4, 5, 6, 7], &[2, 7]] {
            assert_eq!(select(cuts), whole, "{cuts:?}");
        }
    }

    #[test]
    fn roots_have_a_smallest_magnitude() {
        assert_eq!([4.0, -4.0, 0.0, 1e-9, -1e-9].map(root), [2.0, -2.0, 0.0, 1e-3, -1e-3]);
    }
}
