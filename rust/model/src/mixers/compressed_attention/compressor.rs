//! Compression of blocks of tokens to vectors: their mean by a softmax over the block, normed and rotated.

use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::scan::{SoftmaxPooling, softmax_pooling, softmax_pooling_state_len};
use ferrule_kernels::{PoolError, Rows, RowsMut, Scratch};

use super::write_rows;
use crate::layer::norm_heads;
use crate::memory::{Memory, Place};
use crate::mixers::MixerPass;
use crate::rope::{RopeRows, RopeSpec};
use crate::spec::NormSpec;
use crate::weights::{LoadError, Loader, Norm, Tensors};

/// Shape of the means of blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pooling {
    /// Length of a mean.
    pub dim: usize,
    /// Number of tokens of a block.
    pub block: usize,
    /// Whether a mean is also over the block before.
    pub overlap: bool,
}

/// Weights of a compression.
pub(super) struct Compressor {
    pub pooling: Pooling,
    /// Number added to the gates by the place in the block: `[block, columns]`.
    bias: Vec<f32>,
    norm: Norm,
}

/// Buffers of a compression.
#[derive(Default)]
pub(super) struct Buffers {
    /// Means, in the rows that end a block: `[rows, dim]`.
    means: Scratch<f32>,
    /// Vectors of the blocks that end in the batch: `[blocks, dim]`.
    vectors: Vec<f32>,
    /// Angles of the blocks' first positions.
    angles: RopeRows,
}

impl Pooling {
    /// Returns the number of columns of values, and of gates.
    pub fn columns(&self) -> usize {
        self.dim * if self.overlap { 2 } else { 1 }
    }

    /// Returns the floats of the state of an incomplete block.
    pub fn state_len(&self) -> usize {
        softmax_pooling_state_len(self.dim, self.overlap)
    }

    /// Loads the weights; roles start with `at`.
    pub fn load(self, loader: &Loader<'_>, at: &str, norm: NormSpec) -> Result<Compressor, LoadError> {
        Ok(Compressor {
            pooling: self,
            bias: loader.vector(&format!("{at}bias.weight"), self.block * self.columns())?,
            norm: loader.norm(&format!("{at}norm"), norm, self.dim)?,
        })
    }
}

impl Compressor {
    pub fn list<'a, M>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.vectors.push(&self.bias);
        tensors.norm(&self.norm);
    }

    /// Writes the vectors of the blocks that end in the batch to their pages, and the states after it. `rope` is the index of
    /// the rotary embedding, and `inputs` are the values and gates of the rows.
    pub fn run(
        &self,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        rope: usize,
        inputs: [Rows<'_>; 2],
        [state, place]: [Place; 2],
        Buffers { means, vectors, angles }: &mut Buffers,
    ) -> Result<(), PoolError> {
        let (exec, rows) = (&pass.exec, pass.rows);
        let Pooling { dim, block, overlap } = self.pooling;
        let sequences = rows.sequences[place.group].iter();
        let positions: Vec<_> =
            sequences.flat_map(|sequence| (sequence.first_position..).take(sequence.rows)).collect();
        let means = means.take(rows.count * dim);
        let pooling = SoftmaxPooling { channels: dim, block, overlap, bias: &self.bias };
        let states = memory.floats_mut(state);
        softmax_pooling(exec, inputs, &pooling, &positions, &rows.segments[state.group], states, means)?;

        let ends = || (0..rows.count).filter(|row| (positions[*row] + 1).is_multiple_of(block));
        vectors.clear();
        ends().for_each(|row| vectors.extend_from_slice(&means[row * dim..][..dim]));
        norm_heads(exec, &self.norm, RowsMut::new(vectors, dim, 0), 1, dim)?;
        let rope = &pass.ropes[rope];
        angles.fill(rope, ends().map(|row| (positions[row] + 1 - block, 0)));
        let (RopeSpec { rotary_dim, interleaved, .. }, RopeRows { cos, sin }) = (rope, &*angles);
        let (rotary_dim, interleaved) = (*rotary_dim, *interleaved);
        let rope = Rope { heads: 1, head_dim: dim, first: dim - rotary_dim, rotary_dim, interleaved, cos, sin };
        rope_in_place(exec, RowsMut::new(vectors, dim, 0), &rope)?;
        let places = ends().map(|row| rows.places[place.group][row]);
        write_rows(memory.floats_mut(place), places, vectors.chunks_exact(dim), block);
        Ok(())
    }
}
