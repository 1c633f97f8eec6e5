//! AWQ (Lin et al. 2023), as AutoAWQ saves it for its GEMM kernels.
//!
//! Tensors of a module: `qweight` I32 `[inputs, outputs / 8]`, `qzeros` I32 `[groups, outputs / 8]`, `scales` `[groups,
//! outputs]`. A word holds eight outputs, interleaved.
//!
//! <https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py>

use std::num::NonZeroUsize;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dequantize::Quantized;
use super::error::QuantizedError;
use super::grid::Grid;
use super::grouped::{Codes, Grouped, Groups, Interleaved, Zeros};
use super::parts::{Parts, expect_shape, shape_fault};
use crate::dtype::Dtype;

/// Tensor names of a module.
pub(super) const PARTS: &[&str] = &["qweight", "scales", "qzeros"];

/// AWQ quantization: 4-bit codes with scales and zero points per group.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Awq {
    /// Number of inputs that share a scale; `None` for one scale per row.
    pub group_size: Option<NonZeroUsize>,
}

impl Awq {
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
        let [inputs, width] = parts.expect_matrix(&words)?;
        if inputs == 0 || width == 0 {
            return Err(shape_fault(&words, "[inputs, outputs / 8], both > 0".to_owned()));
        }
        let outputs = width * 8;
        let size = self.group_size.map_or(inputs, NonZeroUsize::get).min(inputs);
        let count = inputs.div_ceil(size);
        expect_shape(&scales, &[&[count, outputs]])?;
        expect_shape(&zeros, &[&[count, width]])?;
        let grouped = Grouped {
            inputs,
            codes: Codes::Interleaved(Interleaved { words, width }),
            scales: Grid::new(parts, scales, [1, outputs])?,
            zeros: Zeros::Interleaved(Interleaved { words: zeros, width }),
            groups: Groups::Even(size),
        };
        Ok(Some(Quantized { shape: vec![outputs, inputs], numbers: Arc::new(grouped) }))
    }
}
