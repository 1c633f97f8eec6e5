//! GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel save it.
//!
//! Tensors of a module: `qweight` I32 `[inputs * bits / 32, outputs]`, each column a stream of codes; `scales`
//! `[groups, outputs]`; `qzeros` I32 `[groups, outputs * bits / 32]`, each row a stream; `g_idx` I32 `[inputs]`, the
//! group of each input. The first version of the format stores zero points minus 1.
//!
//! <https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/nn_modules/qlinear/__init__.py>

use std::num::NonZeroUsize;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dequantize::Quantized;
use super::error::QuantizedError;
use super::grid::Grid;
use super::grouped::{Codes, Grouped, Groups, Zeros};
use super::parts::{Parts, expect_shape, shape_fault};
use super::streams::Streams;
use crate::dtype::Dtype;

/// Tensor names of a module.
pub(super) const PARTS: &[&str] = &["qweight", "scales", "qzeros"];

/// GPTQ quantization.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Gptq {
    /// Bits per code.
    pub bits: GptqBits,
    /// Number of inputs that share a scale; `None` for one scale per row.
    pub group_size: Option<NonZeroUsize>,
    /// Whether inputs were quantized in another order (act-order), so that `g_idx` lists the group of each.
    pub desc_act: bool,
    /// Whether zero points are stored minus 1.
    pub zeros_less_one: bool,
}

/// Bits per code: 2, 3, 4 or 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct GptqBits(u32);

impl TryFrom<u32> for GptqBits {
    type Error = String;

    fn try_from(bits: u32) -> Result<Self, String> {
        if matches!(bits, 2 | 3 | 4 | 8) {
            Ok(Self(bits))
        } else {
            Err(format!("bits must be 2, 3, 4 or 8, got {bits}"))
        }
    }
}

impl From<GptqBits> for u32 {
    fn from(bits: GptqBits) -> Self {
        bits.0
    }
}

impl Gptq {
    pub(super) fn weight<'a>(&self, parts: &Parts<'a>, name: &str) -> Result<Option<Quantized<'a>>, QuantizedError> {
        let Some(module) = name.strip_suffix(".weight") else { return Ok(None) };
        let part = |end: &str| format!("{module}.{end}");
        if parts.find(name).is_some() || PARTS.iter().all(|end| parts.find(&part(end)).is_none()) {
            return Ok(None);
        }
        let require = |end: &str| parts.require(name, &part(end));
        let (words, scales, zeros) = (require("qweight")?, require("scales")?, require("qzeros")?);
        parts.expect_dtype(&words, &[Dtype::I32])?;
        parts.expect_dtype(&zeros, &[Dtype::I32])?;
        let [stored, outputs] = parts.expect_matrix(&words)?;
        let bits = self.bits.0;
        let column = stored.saturating_mul(32);
        let inputs = column / bits as usize;
        if inputs == 0 || outputs == 0 || !column.is_multiple_of(bits as usize) {
            return Err(shape_fault(&words, format!("[inputs * {bits} / 32, outputs], without a remainder")));
        }
        let size = self.group_size.map_or(inputs, NonZeroUsize::get).min(inputs);
        let count = inputs.div_ceil(size);
        let width = Streams::words_of(outputs, bits);
        expect_shape(&scales, &[&[count, outputs]])?;
        expect_shape(&zeros, &[&[count, width]])?;
        let listed = if self.desc_act { Some(require("g_idx")?) } else { parts.find(&part("g_idx")) };
        let groups = match listed {
            Some(groups) => {
                parts.expect_dtype(&groups, &[Dtype::I32])?;
                expect_shape(&groups, &[&[inputs]])?;
                Groups::listed(groups, count, size)?
            }
            None => Groups::Even(size),
        };
        let zeros = Streams { words: zeros, strides: [width, 1], length: width, bits };
        let grouped = Grouped {
            inputs,
            codes: Codes::Streams(Streams { words, strides: [1, outputs], length: stored, bits }),
            scales: Grid::new(parts, scales, [1, outputs])?,
            zeros: if self.zeros_less_one { Zeros::StreamsLessOne(zeros) } else { Zeros::Streams(zeros) },
            groups,
        };
        Ok(Some(Quantized { shape: vec![outputs, inputs], numbers: Arc::new(grouped) }))
    }
}
