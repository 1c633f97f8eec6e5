//! Slices that end at a guard page: a read or write past the end crashes the test.

use std::ops::{Deref, DerefMut};

/// Slice of `len` elements right before a guard page.
pub struct Guarded<T> {
    start: *mut u8,
    bytes: usize,
    elements: *mut T,
    len: usize,
}

impl<T: Copy> Guarded<T> {
    /// Copies `values`.
    pub fn new(values: &[T]) -> Self {
        const PAGE: usize = 4096;
        let bytes = size_of_val(values).next_multiple_of(PAGE) + PAGE;
        // SAFETY: new anonymous memory; its last page is protected, and the elements are copied to the end of the rest.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            let start: *mut u8 = start.cast();
            let end = start.add(bytes - PAGE);
            assert_eq!(libc::mprotect(end.cast(), PAGE, libc::PROT_NONE), 0);
            let elements: *mut T = end.sub(size_of_val(values)).cast();
            assert!(elements.is_aligned());
            elements.copy_from_nonoverlapping(values.as_ptr(), values.len());
            Self { start, bytes, elements, len: values.len() }
        }
    }
}

impl<T> Deref for Guarded<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new` wrote `len` elements there.
        unsafe { std::slice::from_raw_parts(self.elements, self.len) }
    }
}

impl<T> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `new` wrote `len` elements there, and this value owns them and is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.elements, self.len) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: unmaps the memory that `new` mapped, which nothing borrows any more.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}
