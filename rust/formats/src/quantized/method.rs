//! [`StoredAs`]: the quantization methods, one file each.

use serde::{Deserialize, Serialize};

use super::awq::{self, Awq};
use super::bitsandbytes::BitsAndBytes;
use super::compressed_tensors::{self, CompressedTensors};
use super::dequantize::Quantized;
use super::error::QuantizedError;
use super::fp8::Fp8;
use super::gptq::{self, Gptq};
use super::mxfp4::{self, Mxfp4};
use super::parts::Parts;
use crate::tensor::FindTensor;

/// Quantization method of a checkpoint, from its `quantization_config`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(tag = "method")]
#[allow(missing_docs, reason = "each is documented where it is")]
pub enum StoredAs {
    #[serde(rename = "gptq")]
    Gptq(Gptq),
    #[serde(rename = "awq")]
    Awq(Awq),
    #[serde(rename = "compressed-tensors")]
    CompressedTensors(CompressedTensors),
    #[serde(rename = "fp8")]
    Fp8(Fp8),
    #[serde(rename = "bitsandbytes")]
    BitsAndBytes(BitsAndBytes),
    #[serde(rename = "mxfp4")]
    Mxfp4(Mxfp4),
}

impl StoredAs {
    /// Returns the name of the method, for messages.
    fn name(&self) -> &'static str {
        match self {
            Self::Gptq(_) => "GPTQ",
            Self::Awq(_) => "AWQ",
            Self::CompressedTensors(_) => "compressed-tensors",
            Self::Fp8(_) => "FP8",
            Self::BitsAndBytes(_) => "bitsandbytes",
            Self::Mxfp4(_) => "MXFP4",
        }
    }

    /// Returns whether the checkpoint has the tensors of a quantized weight with that name.
    pub(crate) fn has(&self, tensors: &dyn FindTensor, name: &str) -> bool {
        let suffixes: &[&str] = match self {
            Self::Gptq(_) => gptq::PARTS,
            Self::Awq(_) => awq::PARTS,
            Self::CompressedTensors(_) => compressed_tensors::PARTS,
            Self::Mxfp4(_) => {
                return mxfp4::PARTS.iter().any(|end| tensors.find(&format!("{name}{end}")).is_some());
            }
            Self::Fp8(_) | Self::BitsAndBytes(_) => return false,
        };
        name.strip_suffix(".weight")
            .is_some_and(|module| suffixes.iter().any(|end| tensors.find(&format!("{module}.{end}")).is_some()))
    }

    /// Returns the weight of that name if it is quantized by this method.
    pub(crate) fn weight<'a>(
        &self,
        tensors: &'a dyn FindTensor,
        name: &str,
    ) -> Result<Option<Quantized<'a>>, QuantizedError> {
        let parts = Parts { tensors, method: self.name() };
        match self {
            Self::Gptq(gptq) => gptq.weight(&parts, name),
            Self::Awq(awq) => awq.weight(&parts, name),
            Self::CompressedTensors(compressed) => compressed.weight(&parts, name),
            Self::Fp8(fp8) => fp8.weight(&parts, name),
            Self::BitsAndBytes(bits) => bits.weight(&parts, name),
            Self::Mxfp4(mxfp4) => mxfp4.weight(&parts, name),
        }
    }
}
