//! A model's weights as the kernels read them, and how they come out of a checkpoint.

use ferrule_formats::{Checkpoint, CheckpointError, FloatTensor};
use ferrule_kernels::arch::LANES;
use ferrule_kernels::{AllocError, Exec, Format, PackError, PackedMatrix, PoolError, RowSource, machine};

use crate::limits::SpecError;
use crate::quantization::Quantization;
use crate::random::RandomMatrix;
use crate::spec::{FfnSpec, LayerSpec, ModelSpec, NormSpec};

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The description cannot be.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The files cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A tensor's shape is not what the config says.
    #[error("tensor {tensor:?} has the shape {found:?}; the config asks for {expected:?} ({meaning})")]
    Shape {
        /// Its name in the checkpoint.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// What the config asks for.
        expected: Vec<usize>,
        /// What the axes are.
        meaning: &'static str,
    },
    /// More than the machine or the container has.
    #[error("{what} needs {needs} bytes; {available} bytes are available here")]
    Memory {
        /// What was to be allocated.
        what: &'static str,
        /// Bytes needed.
        needs: u64,
        /// Bytes that the machine and the container have left.
        available: u64,
    },
    /// The load was cancelled.
    #[error("the load was cancelled")]
    Cancelled,
    /// A defect of ferrule.
    #[error("a worker panicked while packing weights: {0}")]
    Panicked(String),
}

impl From<PackError> for LoadError {
    fn from(error: PackError) -> Self {
        match error {
            PackError::Pool(PoolError::Cancelled) => Self::Cancelled,
            PackError::Pool(PoolError::Panicked(message)) => Self::Panicked(message),
            PackError::Memory(AllocError { bytes }) => {
                Self::Memory { what: "a packed matrix", needs: bytes, available: machine::available_memory() }
            }
        }
    }
}

/// y = W x + b
pub(crate) struct Linear {
    pub weight: PackedMatrix,
    pub bias: Option<Vec<f32>>,
}

/// A norm's spec with its weights.
pub(crate) struct Norm {
    pub spec: NormSpec,
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
}

impl Norm {
    fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        [&self.weight].into_iter().chain(&self.bias)
    }
}

/// One layer's weights; the projections that share an input are one matrix.
pub(crate) struct Layer {
    pub attention_norm: Norm,
    /// Rows: all query heads, all key heads, all value heads.
    pub qkv: Linear,
    /// Weights for each query head and for each key head.
    pub qk_norm: Option<[Vec<f32>; 2]>,
    pub output: Linear,
    pub ffn_norm: Norm,
    /// Rows: gate, up.
    pub gate_up: Linear,
    pub down: Linear,
}

/// All weights.
pub(crate) struct Weights {
    /// A row for each token; also the head's matrix where that is tied.
    pub embedding: PackedMatrix,
    pub layers: Vec<Layer>,
    pub final_norm: Norm,
    /// None where the head is the embedding.
    pub head: Option<Linear>,
}

impl Weights {
    /// Every packed matrix.
    pub fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let layers = self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]);
        layers.chain(&self.head).map(|linear| &linear.weight).chain([&self.embedding])
    }

    /// Every vector of weights: norms and biases.
    pub fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        let layers = self.layers.iter().flat_map(|layer| {
            let norms = [&layer.attention_norm, &layer.ffn_norm].into_iter().flat_map(Norm::vectors);
            let biases = [&layer.qkv, &layer.output, &layer.gate_up, &layer.down].map(|linear| &linear.bias);
            norms.chain(layer.qk_norm.iter().flatten()).chain(biases.into_iter().flatten())
        });
        layers.chain(self.final_norm.vectors()).chain(self.head.iter().filter_map(|head| head.bias.as_ref()))
    }
}

/// Where weights come from.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// A checkpoint's files.
    Checkpoint(&'a Checkpoint),
    /// Random numbers, made as they are packed.
    Random,
}

/// What a role's weights are read from.
enum Stored<'a> {
    Tensor(FloatTensor<'a>),
    Random(RandomMatrix),
}

impl Stored<'_> {
    fn rows(&self) -> usize {
        match self {
            Self::Tensor(tensor) => tensor.shape()[0],
            Self::Random(matrix) => matrix.rows,
        }
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Tensor(tensor) => tensor.read_f32(row * out.len(), out),
            Self::Random(matrix) => matrix.read_row(row, out),
        }
    }
}

/// A matrix that is to be packed: stored matrices, their rows one after the other.
struct MatrixPlan<'a> {
    parts: Vec<Stored<'a>>,
    /// Formats and how many rows each holds, as the kernels take them.
    bands: Vec<(Format, usize)>,
    columns: usize,
    bias: Option<Vec<f32>>,
}

impl MatrixPlan<'_> {
    fn bytes(&self) -> u64 {
        let bytes = |&(format, rows): &_| PackedMatrix::bytes_for(format, rows, self.columns).unwrap_or(u64::MAX);
        self.bands.iter().map(bytes).fold(0, u64::saturating_add)
    }

    fn pack(&self, exec: &Exec<'_>) -> Result<PackedMatrix, PackError> {
        match self.parts[0] {
            // Random bytes are as good as random numbers, and there is nothing to search for.
            Stored::Random(RandomMatrix { seed, .. }) if self.bands[0].0.is_integer() => {
                PackedMatrix::random(exec, &self.bands, self.columns, seed)
            }
            _ => PackedMatrix::pack(exec, &self.bands, self.columns, self),
        }
    }
}

impl RowSource for MatrixPlan<'_> {
    fn read_row(&self, mut row: usize, out: &mut [f32]) {
        for part in &self.parts {
            if row < part.rows() {
                return part.read_row(row, out);
            }
            row -= part.rows();
        }
    }
}

/// The bands of a matrix whose parts have these formats and rows: neighbours that are stored alike are one. Where a
/// format would end within a panel, all rows get the widest.
fn bands(parts: &[(Format, usize)]) -> Vec<(Format, usize)> {
    let mut bands: Vec<(Format, usize)> = Vec::with_capacity(parts.len());
    for &(format, rows) in parts {
        match bands.last_mut() {
            Some((last, count)) if *last == format => *count += rows,
            Some((_, count)) if !count.is_multiple_of(LANES) => {
                let widest = Format::ALL.iter().find(|each| parts.iter().any(|(format, _)| format == *each));
                return vec![(*widest.unwrap_or(&format), parts.iter().map(|(_, rows)| rows).sum())];
            }
            _ => bands.push((format, rows)),
        }
    }
    bands
}

/// Told how many bytes of the packed weights are done, of how many.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Reads the roles of a spec out of a source.
pub(crate) struct Loader<'a> {
    pub spec: &'a ModelSpec,
    pub source: Source<'a>,
    /// The formats to pack in.
    pub quantization: Quantization,
    pub exec: Exec<'a>,
}

struct LayerPlan<'a> {
    qkv: MatrixPlan<'a>,
    output: MatrixPlan<'a>,
    gate_up: MatrixPlan<'a>,
    down: MatrixPlan<'a>,
}

impl<'a> Loader<'a> {
    /// Packs all weights, tensor by tensor; the source's pages are given back after each.
    ///
    /// # Errors
    /// [`LoadError`], before anything large is allocated where a file or the memory is at fault.
    pub fn load(&self, progress: Progress<'_>) -> Result<Weights, LoadError> {
        let (vocabulary, hidden, ends) = (self.spec.vocab_size, self.spec.hidden_size, self.quantization.ends());
        let embedding = self.matrix(&[("embedding", vocabulary, ends)], hidden, false)?;
        let head = match self.spec.head.tied {
            true => None,
            false => Some(self.matrix(&[("head", vocabulary, ends)], hidden, self.spec.head.bias)?),
        };
        let layers = self.spec.layers.iter().enumerate();
        let layers = layers.map(|(i, layer)| self.layer_plan(i, layer)).collect::<Result<Vec<_>, _>>()?;

        let each = |layer: &LayerPlan<'_>| {
            [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]
                .map(MatrixPlan::bytes)
                .into_iter()
                .fold(0, u64::saturating_add)
        };
        let total = [&embedding]
            .into_iter()
            .chain(&head)
            .map(MatrixPlan::bytes)
            .chain(layers.iter().map(each))
            .fold(0, u64::saturating_add);
        let available = machine::available_memory();
        if total > available {
            return Err(LoadError::Memory { what: "the model's packed weights", needs: total, available });
        }

        let mut done = 0;
        let mut pack = |plan: MatrixPlan<'a>| -> Result<Linear, LoadError> {
            let weight = plan.pack(&self.exec)?;
            plan.parts.iter().for_each(|part| self.release(part));
            done += weight.bytes() as u64;
            progress(done, total);
            Ok(Linear { weight, bias: plan.bias })
        };
        let embedding = pack(embedding)?.weight;
        let mut packed_layers = Vec::with_capacity(layers.len());
        for (i, (plan, layer)) in layers.into_iter().zip(&self.spec.layers).enumerate() {
            let norm = |role: &str, spec| self.norm(&format!("layers.{i}.{role}"), spec, self.spec.hidden_size);
            let head_norm =
                |role: &str| self.vector(&format!("layers.{i}.attention.{role}.weight"), layer.attention.key_dim);
            let qk_norm = match layer.attention.qk_norm {
                None => None,
                Some(_) => Some([head_norm("q_norm")?, head_norm("k_norm")?]),
            };
            packed_layers.push(Layer {
                attention_norm: norm("attention_norm", layer.attention_norm)?,
                qkv: pack(plan.qkv)?,
                qk_norm,
                output: pack(plan.output)?,
                ffn_norm: norm("ffn_norm", layer.ffn_norm)?,
                gate_up: pack(plan.gate_up)?,
                down: pack(plan.down)?,
            });
        }
        Ok(Weights {
            embedding,
            layers: packed_layers,
            final_norm: self.norm("final_norm", self.spec.final_norm, self.spec.hidden_size)?,
            head: head.map(pack).transpose()?,
        })
    }

    fn layer_plan(&self, index: usize, layer: &LayerSpec) -> Result<LayerPlan<'a>, LoadError> {
        let hidden = self.spec.hidden_size;
        let attention = &layer.attention;
        let FfnSpec::Gated { intermediate_size, bias, .. } = layer.ffn;
        let matrix = |parts: &[(&str, usize, Format)], columns, bias| {
            let roles: Vec<_> = parts.iter().map(|(role, ..)| format!("layers.{index}.{role}")).collect();
            let parts = roles.iter().zip(parts).map(|(role, &(_, rows, format))| (role.as_str(), rows, format));
            self.matrix(&parts.collect::<Vec<_>>(), columns, bias)
        };
        let (quantization, usual) = (self.quantization, self.quantization.usual());
        let (queries, keys) = (attention.heads * attention.key_dim, attention.kv_heads * attention.key_dim);
        let values = attention.kv_heads * attention.value_dim;
        Ok(LayerPlan {
            qkv: matrix(
                &[
                    ("attention.q", queries, usual),
                    ("attention.k", keys, usual),
                    ("attention.v", values, quantization.values()),
                ],
                hidden,
                attention.qkv_bias,
            )?,
            output: matrix(
                &[("attention.output", hidden, usual)],
                attention.heads * attention.value_dim,
                attention.output_bias,
            )?,
            gate_up: matrix(
                &[("ffn.gate", intermediate_size, usual), ("ffn.up", intermediate_size, usual)],
                hidden,
                bias,
            )?,
            down: matrix(
                &[("ffn.down", hidden, quantization.down(index, self.spec.layers.len()))],
                intermediate_size,
                bias,
            )?,
        })
    }

    fn stored(&self, role: &str, rows: usize, columns: usize) -> Result<Stored<'a>, LoadError> {
        Ok(match self.source {
            Source::Checkpoint(checkpoint) => {
                Stored::Tensor(self.tensor(checkpoint, role, &[rows, columns], "outputs, inputs")?)
            }
            Source::Random => Stored::Random(RandomMatrix::new(role, rows)),
        })
    }

    /// Gives back the memory behind what was packed.
    fn release(&self, part: &Stored<'a>) {
        if let (Source::Checkpoint(checkpoint), Stored::Tensor(tensor)) = (self.source, part) {
            checkpoint.release(tensor);
        }
    }

    /// Finds and checks what is stored for `<role>.weight` (and `<role>.bias`) of a matrix, one below the other.
    fn matrix(&self, roles: &[(&str, usize, Format)], columns: usize, bias: bool) -> Result<MatrixPlan<'a>, LoadError> {
        let mut parts = Vec::with_capacity(roles.len());
        let mut biases = Vec::new();
        for (role, rows, _) in roles {
            parts.push(self.stored(&format!("{role}.weight"), *rows, columns)?);
            if bias {
                biases.extend(self.vector(&format!("{role}.bias"), *rows)?);
            }
        }
        let formats: Vec<_> = roles.iter().map(|&(_, rows, format)| (format, rows)).collect();
        Ok(MatrixPlan { parts, bands: bands(&formats), columns, bias: bias.then_some(biases) })
    }

    fn norm(&self, role: &str, spec: NormSpec, width: usize) -> Result<Norm, LoadError> {
        let weight = self.vector(&format!("{role}.weight"), width)?;
        let bias = match spec {
            NormSpec::Rms { .. } => None,
            NormSpec::Layer { .. } => Some(self.vector(&format!("{role}.bias"), width)?),
        };
        Ok(Norm { spec, weight, bias })
    }

    fn vector(&self, role: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        let mut vector = vec![0.0; length];
        match self.source {
            Source::Checkpoint(checkpoint) => {
                self.tensor(checkpoint, role, &[length], "elements")?.read_f32(0, &mut vector);
            }
            Source::Random if role.ends_with(".bias") => {}
            Source::Random => vector.fill(1.0),
        }
        Ok(vector)
    }

    fn tensor(
        &self,
        checkpoint: &'a Checkpoint,
        role: &str,
        expected: &[usize],
        meaning: &'static str,
    ) -> Result<FloatTensor<'a>, LoadError> {
        let name = self.spec.tensor(role)?;
        let tensor = checkpoint.float_tensor(name)?;
        if tensor.shape() != expected {
            return Err(LoadError::Shape {
                tensor: name.to_owned(),
                found: tensor.shape().to_vec(),
                expected: expected.to_vec(),
                meaning,
            });
        }
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use ferrule_kernels::Format::{Int4, Int6};

    use super::*;

    #[test]
    fn bands_end_with_panels() {
        assert_eq!(bands(&[(Int4, 7)]), [(Int4, 7)]);
        assert_eq!(bands(&[(Int4, 7), (Int4, 9)]), [(Int4, 16)]);
        assert_eq!(bands(&[(Int4, 40), (Int4, 8), (Int6, 5)]), [(Int4, 48), (Int6, 5)]);
        assert_eq!(bands(&[(Int4, 40), (Int4, 7), (Int6, 5)]), [(Int6, 52)]);
        assert_eq!(bands(&[(Int6, 5), (Int4, 32), (Int6, 16)]), [(Int6, 53)]);
        assert_eq!(bands(&[(Int6, 16), (Int4, 5), (Int6, 16)]), [(Int6, 37)]);
    }
}
